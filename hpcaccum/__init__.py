"""Gradient exchange for clusters that speak MPI."""

from __future__ import annotations

from hpcaccum.accumulator import ConditionalAccumulator
from hpcaccum.device_accumulator import DeviceAccumulator
from hpcaccum.device_rounds import DeviceReceipt, DeviceStatistics
from hpcaccum.device_rows import DeviceRowAccumulator
from hpcaccum.errors import (
    DeviceUnavailableError,
    DisagreementError,
    EverybodyLeftError,
    FreedError,
    InvalidArgumentError,
    MPIUnavailableError,
    WaitTimeoutError,
)
from hpcaccum.group import Group
from hpcaccum.int8 import Int8Compressor, Int8Gradient
from hpcaccum.layout import Layout
from hpcaccum.ledger import Receipt, Tally
from hpcaccum.mpi import install_excepthook
from hpcaccum.optimizers import (
    SGD,
    Adagrad,
    Adam,
    AGNCustomGetter,
    AGNOptimizer,
    CrossShardOptimizer,
    DropStaleGradientOptimizer,
    Momentum,
    Optimizer,
    Reduction,
    SyncReplicasOptimizer,
    Variable,
    get_variable,
)
from hpcaccum.reducer import Reducer
from hpcaccum.reducer_statistics import ReducerStatistics
from hpcaccum.shared_accumulator import Statistics

__version__ = "0.1.0"

__all__ = [
    "SGD",
    "AGNCustomGetter",
    "AGNOptimizer",
    "Adagrad",
    "Adam",
    "ConditionalAccumulator",
    "CrossShardOptimizer",
    "DeviceAccumulator",
    "DeviceReceipt",
    "DeviceRowAccumulator",
    "DeviceStatistics",
    "DeviceUnavailableError",
    "DisagreementError",
    "DropStaleGradientOptimizer",
    "EverybodyLeftError",
    "FreedError",
    "Group",
    "Int8Compressor",
    "Int8Gradient",
    "InvalidArgumentError",
    "Layout",
    "MPIUnavailableError",
    "Momentum",
    "Optimizer",
    "Receipt",
    "Reducer",
    "ReducerStatistics",
    "Reduction",
    "Statistics",
    "SyncReplicasOptimizer",
    "Tally",
    "Variable",
    "WaitTimeoutError",
    "get_variable",
]

install_excepthook()
