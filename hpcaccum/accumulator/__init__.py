"""Accumulators: gradients are admitted if they are not stale, and summed until taken.

A gradient enters through `ConditionalAccumulator.apply_grad`, is admitted by
`protocol`, written by `writer` to `storage`, and summed there by the take. The
`DeviceAccumulator` does the same on one CUDA device, without MPI.

Imports `mpi`, `device` and the modules below them; never `reducer`.
"""

from __future__ import annotations

from hpcaccum.accumulator.conditional import ConditionalAccumulator
from hpcaccum.accumulator.device_accumulator import DeviceAccumulator
from hpcaccum.accumulator.device_rounds import (
    DeviceReceipt,
    DeviceRounds,
    DeviceStatistics,
)
from hpcaccum.accumulator.device_rows import DeviceRowAccumulator
from hpcaccum.accumulator.membership import Membership
from hpcaccum.accumulator.receipts import Counters, Counts, Receipt, Tally
from hpcaccum.accumulator.shared import AccumulatorStatistics
from hpcaccum.accumulator.word_layout import WordLayout

__all__ = [
    "AccumulatorStatistics",
    "ConditionalAccumulator",
    "Counters",
    "Counts",
    "DeviceAccumulator",
    "DeviceReceipt",
    "DeviceRounds",
    "DeviceRowAccumulator",
    "DeviceStatistics",
    "Membership",
    "Receipt",
    "Tally",
    "WordLayout",
]
