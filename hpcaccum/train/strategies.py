"""The four strategies of gradient exchange: their optimizers, made from options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import hpcaccum as hpc

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpcaccum.dtypes import Array
    from hpcaccum.train.options import Options


@dataclass(frozen=True)
class Exchange:
    """An optimizer of one strategy, and what the training loop must know of it.

    Attributes:
        optimizer: The optimizer, not yet initialized.
        variable: Makes a variable from an array and a name.
        samples: Number of samples in one update of the parameters.
        gradient_samples: Number of samples in one gradient that is exchanged.
        exact: Whether each rank that trains has a gradient in each update.
    """

    optimizer: Any
    variable: Callable[[Array, str], hpc.Variable]
    samples: int
    gradient_samples: int
    exact: bool = False


def _rule(options: Options) -> hpc.Optimizer:
    return RULES[options.optimizer](options.rate)


RULES: dict[str, Callable[[float], hpc.Optimizer]] = {
    "sgd": hpc.SGD,
    "momentum": lambda rate: hpc.Momentum(rate, 0.9),
    "adagrad": hpc.Adagrad,
    "adam": hpc.Adam,
}


def _cross_shard(options: Options, group: hpc.Group) -> Exchange:
    optimizer = hpc.CrossShardOptimizer(
        _rule(options), group_assignment=options.groups or None, comm=group
    )
    # Samples of all groups: each group trains its own model on its share of them.
    samples = options.batch * group.size
    return Exchange(optimizer, hpc.Variable, samples, options.batch, exact=True)


def _served(options: Options) -> dict[str, Any]:
    return {"dedicated": options.dedicated, "servers": options.servers}


def _sync_replicas(options: Options, group: hpc.Group) -> Exchange:
    optimizer = hpc.SyncReplicasOptimizer(
        _rule(options), options.quorum, comm=group, **_served(options)
    )
    samples = options.batch * options.quorum
    exact = options.quorum == group.size - len(options.only_serve)
    return Exchange(optimizer, hpc.Variable, samples, options.batch, exact)


def _drop_stale(options: Options, group: hpc.Group) -> Exchange:
    optimizer = hpc.DropStaleGradientOptimizer(
        _rule(options), options.staleness, comm=group, **_served(options)
    )
    return Exchange(optimizer, hpc.Variable, options.batch, options.batch)


def _agn(options: Options, group: hpc.Group) -> Exchange:
    getter = hpc.AGNCustomGetter(comm=group, host=options.host)
    optimizer = hpc.AGNOptimizer(
        _rule(options),
        group.size - len(options.only_serve),
        getter,
        communication_period=options.period,
        **_served(options),
    )

    def variable(array: Array, name: str) -> hpc.Variable:
        return hpc.get_variable(name, array, custom_getter=getter)

    samples = options.batch * options.period
    return Exchange(optimizer, variable, samples, samples)


MAKERS: dict[str, Callable[[Options, hpc.Group], Exchange]] = {
    "cross-shard": _cross_shard,
    "sync-replicas": _sync_replicas,
    "drop-stale": _drop_stale,
    "agn": _agn,
}
