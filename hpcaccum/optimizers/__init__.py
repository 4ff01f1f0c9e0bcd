"""Optimizers: the rules, and the wrappers that exchange gradients."""

from __future__ import annotations

from hpcaccum.optimizers.agn import AGNCustomGetter, AGNOptimizer, get_variable
from hpcaccum.optimizers.base import Optimizer
from hpcaccum.optimizers.checks import check_groups
from hpcaccum.optimizers.cross_shard import CrossShardOptimizer, Reduction
from hpcaccum.optimizers.drop_stale import DropStaleGradientOptimizer
from hpcaccum.optimizers.rules import SGD, Adagrad, Adam, Momentum
from hpcaccum.optimizers.sync_replicas import SyncReplicasOptimizer
from hpcaccum.optimizers.variable import Variable

__all__ = [
    "SGD",
    "AGNCustomGetter",
    "AGNOptimizer",
    "Adagrad",
    "Adam",
    "CrossShardOptimizer",
    "DropStaleGradientOptimizer",
    "Momentum",
    "Optimizer",
    "Reduction",
    "SyncReplicasOptimizer",
    "Variable",
    "check_groups",
    "get_variable",
]
