"""Helpers of the optimizer tests: variables, losses, and ranks that take turns."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import hpcaccum as hpc
from tests import internals

from ..common import check_error as check_error
from .support import meet as meet

# Variables with a few elements, one, and none; and rules for them.
SHAPES = {"matrix": (37, 5), "scalar": (), "vector": (600,), "empty": (0,)}
RULES: dict[str, Callable[[], hpc.Optimizer]] = {
    "SGD": lambda: hpc.SGD(0.1),
    "Momentum": lambda: hpc.Momentum(0.1, 0.9),
    "Adagrad": lambda: hpc.Adagrad(0.1),
    "Adam": lambda: hpc.Adam(lambda step: 0.1 / (step + 1)),
}


def several(*dtypes: Any) -> list[hpc.Variable]:
    """Return variables of ones, of float32 or of these dtypes in turn."""
    pairs = zip(SHAPES.items(), itertools.cycle(dtypes or ["f4"]), strict=False)
    return [hpc.Variable(np.ones(shape, dt), name) for (name, shape), dt in pairs]


def drawn(rank: int, call: int, variables: Sequence[hpc.Variable]) -> list[Any]:
    """Return random gradients of variables."""
    random = np.random.default_rng([rank, call])
    return [random.normal(size=var.shape).astype(var.dtype) for var in variables]


def variable(value: Any = 0.0, dtype: Any = np.float64, name: str = "w"):
    return hpc.Variable(np.array(value, dtype), name)


def gives(*grads: Any) -> Callable[[], tuple[float, list[Any]]]:
    """Return a loss with these gradients at any variables."""
    return lambda: (0.0, list(grads))


def started(optimizer: Any, variables: Any) -> Any:
    """Return an optimizer after `initialize`. Collective."""
    optimizer.initialize(variables)
    return optimizer


def computed(optimizer, *grads: Any) -> list[Any]:
    """Compute gradients on all ranks before any rank applies one."""
    pairs = optimizer.compute_gradients(gives(*grads))
    meet()
    return pairs


def turns(order: Sequence[int], act: Callable[[int], Any]) -> list[Any]:
    """Call ``act(turn)`` on one rank after another; return all results everywhere."""
    return [
        meet(act(turn) if MPI.COMM_WORLD.rank == rank else None)[rank]
        for turn, rank in enumerate(order)
    ]


def raised(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return the exception that the call raises, else its result."""
    try:
        return call(*args, **kwargs)
    except Exception as error:
        return error


class Gate(hpc.Optimizer):
    """SGD(1) that makes an update only when the test permits it."""

    def __init__(self, wait: Callable[[], Any]) -> None:
        super().__init__("gate")
        self._wait = wait

    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        self._wait()
        for grad, var in grads_and_vars:
            var.value[...] -= grad


def _agn(inner, variables, comm, host=0, period=2, **options):
    getter = hpc.AGNCustomGetter(comm=comm, host=host)
    for var in variables:
        getter.register(var)
    return hpc.AGNOptimizer(inner, 1, getter, period, **options)


def _sync(inner, variables, comm, dedicated=False, **options):
    options |= {"comm": comm, "dedicated": dedicated}
    return hpc.SyncReplicasOptimizer(inner, comm.size - bool(dedicated), **options)


def diloco(inner, _, comm, period=2, **options):
    outer = hpc.Momentum(0.7, 0.9, use_nesterov=True)
    return hpc.LocalStepsOptimizer(inner, outer, period, comm=comm, **options)


# Name to factory, called with an inner optimizer, variables, a communicator, options.
ONE_SIDED: dict[str, Callable[..., Any]] = {
    "SyncReplicas": _sync,
    "DropStale": lambda inner, variables, comm, **options: (
        hpc.DropStaleGradientOptimizer(inner, 10**6, comm=comm, **options)
    ),
    "AGN": _agn,
}
WRAPPERS = {
    "CrossShard": lambda inner, variables, comm, **options: hpc.CrossShardOptimizer(
        inner, comm=comm, **options
    ),
    **ONE_SIDED,
}


@pytest.fixture(name="make_one")
def make_one_fixture(comm: MPI.Intracomm, keep: Any) -> Any:
    """Return a function that makes an object, which is freed after the test.

    An optimizer is initialized with the variables, if they are given.
    """

    def make(kind: Any, *args: Any, variables: Any = None, **options: Any) -> Any:
        made = keep(kind(*args, **{"comm": comm} | options))
        if variables is not None:
            made.initialize(variables)
        return made

    return make


@pytest.fixture(name="make")
def cross_shard_fixture(make_one: Any) -> Any:
    """Return a function that makes CrossShardOptimizers."""
    mean, kind = hpc.Reduction.MEAN, hpc.CrossShardOptimizer
    return lambda reduction=mean, groups=None, inner=None: make_one(
        kind, inner or hpc.SGD(1), reduction, group_assignment=groups
    )


@pytest.fixture(name="copies")
def copies_fixture() -> Any:
    """The number of rows of each copy of a table; "all" for a whole one."""
    copied: list[Any] = []
    with internals.note_rows(copied):
        yield copied
