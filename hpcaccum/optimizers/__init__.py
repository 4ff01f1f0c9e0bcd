"""Optimizers: update rules, and wrappers that exchange gradients between ranks.

All have the interface of `base`.

Update rules: SGD, Momentum, Adagrad and Adam (`rules`), on the base of `update_rule`.
    They update one piece that fits into the cache at a time; on a device, all variables
    by a `device_update`. On a server, they may update all variables as one vector.
Wrappers: A `wrapper` holds another optimizer. `cross_shard` reduces gradients in groups
    of ranks (`shard_reducer`); `one_sided` is the base of `sync_replicas`, `drop_stale`
    and of `local_steps`, which is that of `agn`. These four send gradients to a
    parameter server on the ranks that ``servers=`` names, which updates the center;
    `served` has a group of variables and its server, as one rank sees them.
Gradients: `checks` checks what callers pass, `finite` finds NaN and infinity; `slices`
    are for gradients of some rows.
State: `start` gives all ranks the same variables; `snapshot` has the state that rules
    keep of variables, and copies and restores both.
Other libraries: `adapter` is what `torch` and `jax` have in common.

Imports `server`, `reducer` and the packages below them.
"""

from __future__ import annotations

from hpcaccum.optimizers.agn import AGNCustomGetter, AGNOptimizer, get_variable
from hpcaccum.optimizers.base import Optimizer
from hpcaccum.optimizers.cross_shard import CrossShardOptimizer, Reduction
from hpcaccum.optimizers.drop_stale import DropStaleGradientOptimizer
from hpcaccum.optimizers.finite import clip_by_global_norm
from hpcaccum.optimizers.local_steps import LocalStepsOptimizer
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
    "LocalStepsOptimizer",
    "Momentum",
    "Optimizer",
    "Reduction",
    "SyncReplicasOptimizer",
    "Variable",
    "clip_by_global_norm",
    "get_variable",
]
