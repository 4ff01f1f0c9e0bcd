"""Accumulators: gradients are admitted if they are not stale, and summed until taken.

`ConditionalAccumulator` and `SparseConditionalAccumulator` are handles to a
`SharedAccumulator` (`shared`), which a parameter server uses directly.

A gradient: `writer` has it admitted by the `protocol`, or by an agent if the words are
    on another node (`host_calls`), and writes it to one of the rank's two buffers in
    the `storage`. The threads of a rank write in turn (`turns`).
A take: `take` closes the round, and a `batch` has the gradients that are summed.
Words: `membership`, `turns`, `receipts` and `shapes` keep their state in words;
    `state` assigns these, and packs those of the protocol. `settings` has the checked
    arguments.

`DeviceAccumulator` and `DeviceRowAccumulator` accumulate on one CUDA device, in one
process, with a protocol of their own (`device_protocol`).

Imports `nodes`, `rows`, `mpi`, `device` and single modules; never `reducer`.
"""

from __future__ import annotations

from hpcaccum.accumulator.batch import Batch
from hpcaccum.accumulator.conditional import (
    AccumulatorStatistics,
    ConditionalAccumulator,
    Taken,
)
from hpcaccum.accumulator.device_accumulator import DeviceAccumulator
from hpcaccum.accumulator.device_protocol import DeviceStatistics
from hpcaccum.accumulator.device_rows import DeviceRowAccumulator
from hpcaccum.accumulator.membership import Membership
from hpcaccum.accumulator.receipts import Counters, Receipt, Tally
from hpcaccum.accumulator.settings import Settings
from hpcaccum.accumulator.shared import SharedAccumulator
from hpcaccum.accumulator.sparse import SparseConditionalAccumulator, SparseGradient
from hpcaccum.accumulator.state import Packing, WordLayout, admits
from hpcaccum.accumulator.storage import Buffers

__all__ = [
    "AccumulatorStatistics",
    "Batch",
    "Buffers",
    "ConditionalAccumulator",
    "Counters",
    "DeviceAccumulator",
    "DeviceRowAccumulator",
    "DeviceStatistics",
    "Membership",
    "Packing",
    "Receipt",
    "Settings",
    "SharedAccumulator",
    "SparseConditionalAccumulator",
    "SparseGradient",
    "Taken",
    "Tally",
    "WordLayout",
    "admits",
]
