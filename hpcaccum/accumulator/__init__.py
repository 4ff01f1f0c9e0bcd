"""Accumulators: gradients are admitted if they are not stale, and summed until taken.

`ConditionalAccumulator` and `SparseConditionalAccumulator` are handles to the state in
`shared`: `protocol` admits a gradient, `writer` writes it to `storage` or
`row_storage`, and `taker` closes the round. `one_thread` lets the threads of a rank
write in turn, and `recovery` completes or revokes what was interrupted. `membership`,
`ticket_lock`, `receipts` and `shapes` keep their state in words that `word_layout`
assigns; `state` packs the words of the protocol, without MPI.
`VectorAccumulator` is a `ConditionalAccumulator` of vectors, parts of which are rows.
`DeviceAccumulator` accumulates on one CUDA device, in one process.

Imports `nodes`, `mpi`, `device` and the modules below them; never `reducer`.
"""

from __future__ import annotations

from hpcaccum.accumulator.batch import Batch
from hpcaccum.accumulator.conditional import ConditionalAccumulator
from hpcaccum.accumulator.device_accumulator import DeviceAccumulator
from hpcaccum.accumulator.device_protocol import DeviceReceipt, DeviceStatistics
from hpcaccum.accumulator.device_rows import DeviceRowAccumulator
from hpcaccum.accumulator.membership import Membership
from hpcaccum.accumulator.receipts import Count, Counters, Receipt, Tally
from hpcaccum.accumulator.recovery import Recovery
from hpcaccum.accumulator.shared import AccumulatorStatistics
from hpcaccum.accumulator.sparse import SparseConditionalAccumulator, SparseGradient
from hpcaccum.accumulator.vectors import VectorAccumulator
from hpcaccum.accumulator.word_layout import WordLayout

__all__ = [
    "AccumulatorStatistics",
    "Batch",
    "ConditionalAccumulator",
    "Count",
    "Counters",
    "DeviceAccumulator",
    "DeviceReceipt",
    "DeviceRowAccumulator",
    "DeviceStatistics",
    "Membership",
    "Receipt",
    "Recovery",
    "SparseConditionalAccumulator",
    "SparseGradient",
    "Tally",
    "VectorAccumulator",
    "WordLayout",
]
