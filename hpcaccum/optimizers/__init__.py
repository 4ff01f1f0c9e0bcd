"""Optimizers: update rules, and wrappers that exchange gradients between ranks.

`base` is the interface of all, `rules` has SGD, Momentum, Adagrad and Adam, on the base
of `update_rule`. A `wrapper` holds another optimizer: `cross_shard` reduces gradients
with a `Reducer`, `one_sided` is the base of those that use a parameter server, and
`center` is what that server has. `snapshot` copies and restores variables and their
state; `slices` has what gradients of some rows need.

Imports `server`, `reducer` and the packages below them.
"""

from __future__ import annotations

from hpcaccum.optimizers.agn import AGNOptimizer
from hpcaccum.optimizers.agn_getter import AGNCustomGetter, get_variable
from hpcaccum.optimizers.base import Optimizer
from hpcaccum.optimizers.checks import check_groups
from hpcaccum.optimizers.cross_shard import CrossShardOptimizer
from hpcaccum.optimizers.drop_stale import DropStaleGradientOptimizer
from hpcaccum.optimizers.finite import clip_by_global_norm
from hpcaccum.optimizers.reduction import Reduction
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
    "clip_by_global_norm",
    "get_variable",
]
