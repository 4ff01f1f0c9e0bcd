"""Gradient exchange for clusters that run MPI.

docs/architecture.md shows the path of a gradient through the packages.
"""

from __future__ import annotations

from hpcaccum import checkpoint
from hpcaccum.accumulator import (
    AccumulatorStatistics,
    ConditionalAccumulator,
    DeviceAccumulator,
    DeviceRowAccumulator,
    DeviceStatistics,
    Receipt,
    SparseConditionalAccumulator,
    SparseGradient,
    Taken,
    Tally,
)
from hpcaccum.errors import (
    BrokenObjectError,
    CheckpointError,
    DeviceUnavailableError,
    DisagreementError,
    EverybodyLeftError,
    FreedError,
    InvalidArgumentError,
    LostRankError,
    MPIUnavailableError,
    WaitTimeoutError,
)
from hpcaccum.layout import Layout
from hpcaccum.metrics import MetricsLog, log_to
from hpcaccum.mpi import Group, group_of, install_excepthook, is_rank, launched_ranks
from hpcaccum.optimizers import (
    SGD,
    Adagrad,
    Adam,
    AGNCustomGetter,
    AGNOptimizer,
    CrossShardOptimizer,
    DropStaleGradientOptimizer,
    LocalStepsOptimizer,
    Momentum,
    Optimizer,
    Reduction,
    SyncReplicasOptimizer,
    Variable,
    clip_by_global_norm,
    get_variable,
)
from hpcaccum.reducer import Reducer, ReducerStatistics
from hpcaccum.rows import IndexedSlices
from hpcaccum.stopping import Stopping
from hpcaccum.tracing import span, trace

__version__ = "0.1.0"

__all__ = [
    "SGD",
    "AGNCustomGetter",
    "AGNOptimizer",
    "AccumulatorStatistics",
    "Adagrad",
    "Adam",
    "BrokenObjectError",
    "CheckpointError",
    "ConditionalAccumulator",
    "CrossShardOptimizer",
    "DeviceAccumulator",
    "DeviceRowAccumulator",
    "DeviceStatistics",
    "DeviceUnavailableError",
    "DisagreementError",
    "DropStaleGradientOptimizer",
    "EverybodyLeftError",
    "FreedError",
    "Group",
    "IndexedSlices",
    "InvalidArgumentError",
    "Layout",
    "LocalStepsOptimizer",
    "LostRankError",
    "MPIUnavailableError",
    "MetricsLog",
    "Momentum",
    "Optimizer",
    "Receipt",
    "Reducer",
    "ReducerStatistics",
    "Reduction",
    "SparseConditionalAccumulator",
    "SparseGradient",
    "Stopping",
    "SyncReplicasOptimizer",
    "Taken",
    "Tally",
    "Variable",
    "WaitTimeoutError",
    "checkpoint",
    "clip_by_global_norm",
    "get_variable",
    "group_of",
    "log_to",
    "span",
    "trace",
]

# A rank that fails before it uses MPI must end the job, too: the others wait for it.
# In other processes, importing has no side effects.
if launched_ranks() > 1 and is_rank():
    install_excepthook()
