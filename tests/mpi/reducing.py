"""Shared by the tests of reducers: all schedules, simulated nodes, a plain model."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest import mock

import numpy as np
import pytest
from mpi4py import MPI

from hpcaccum import Group, Layout, Reducer, group_of
from hpcaccum.dtypes import accumulation_dtype
from hpcaccum.mpi.life.lifetime import Freeable
from hpcaccum.reducer import staging

from ..common import same_bits

Arrays = Mapping[str, Any]

# The smallest buckets: 256 elements of float32, so that few elements are many buckets.
SMALL = 1024

# Which node of a simulated cluster a rank is on.
NODES: dict[str, Callable[[int, int], int]] = {
    "halves": lambda rank, size: 2 * rank // size,
    "apart": lambda rank, size: rank % 2,
    "singles": lambda rank, size: rank,
    "uneven": lambda rank, size: int(rank == size - 1),
}

# Name to the options with which a reducer uses that path.
KINDS: dict[str, dict[str, Any]] = {
    "one-shot": {"schedule": "shared"},
    "shared": {"schedule": "shared", "bucket_bytes": SMALL},
    "staged": {"schedule": "shared", "bucket_bytes": SMALL},
    "flat": {"schedule": "flat", "bucket_bytes": SMALL},
    "small-flat": {"schedule": "flat"},
    "hierarchical": {"schedule": "hierarchical", "bucket_bytes": SMALL},
}
# `nccl` takes arrays on a device only.
OPTIONS = {**KINDS, "nccl": {"schedule": "nccl", "bucket_bytes": SMALL}}
ALL = pytest.mark.parametrize("maker", KINDS, indirect=True)
# One kind of each schedule: `staged` is `shared` with arrays that are copied elsewhere,
# after the ranks have agreed.
SCHEDULES = [kind for kind in KINDS if kind != "staged"]
EACH = pytest.mark.parametrize("maker", SCHEDULES, indirect=True)


# The arrays of tests of invalid calls.
SHAPES = {"x": (900,), "y": (300,)}
ONES = {name: np.ones(shape, np.float32) for name, shape in SHAPES.items()}


class Maker:
    """Makes reducers of one kind, on simulated nodes if the test names them.

    Attributes:
        nodes: The ranks of each node.
        exact: Whether the order of summation is fixed.
    """

    def __init__(self, comm: MPI.Intracomm, kind: str, nodes: str = "halves") -> None:
        self.group = group_of(comm)
        self.kind, self.exact = kind, not kind.endswith(("flat", "nccl"))
        self._made: list[Reducer] = []
        if kind == "hierarchical" and comm.size > 1 and self.group.single_node:
            self.group = made_up(comm, nodes)
        if OPTIONS[kind]["schedule"] == "shared" and not self.group.single_node:
            pytest.skip("the ranks do not share memory")
        first = self.group.node.bcast(comm.rank)
        found: dict[int, list[int]] = {}
        for rank, node in enumerate(comm.allgather(first)):
            found.setdefault(node, []).append(rank)
        self.nodes = list(found.values())

    def __repr__(self) -> str:
        """Show the kind, for the messages of pytest."""
        return f"Maker({self.kind})"

    def __call__(self, shapes: Any, dtype: Any = np.float32, **options: Any) -> Reducer:
        """Return a reducer. Collective."""
        options = OPTIONS[self.kind] | options
        # The size from which on arrays are copied bucket by bucket.
        coarse = 0 if self.kind == "staged" else 1 << 40
        with mock.patch.object(staging, "_COARSE", coarse):
            self._made.append(Reducer(Layout(shapes, dtype), self.group, **options))
        return self._made[-1]

    def expected(self, parts: Sequence[Any], dtype: Any, **options: Any) -> Any:
        """Return the reduction of one array, from the inputs of all ranks."""
        return model(parts, self.nodes, dtype, **options)

    def check(self, found: Any, expected: Any) -> None:
        """Compare; bit by bit, if the order of summation is fixed."""
        assert found.dtype == expected.dtype, f"{found.dtype}, not {expected.dtype}"
        assert found.shape == expected.shape
        if self.exact:
            same_bits(found, expected)
        else:
            single = expected.dtype != np.float64
            np.testing.assert_allclose(
                found, expected, *([1e-5, 1e-5] if single else [])
            )

    def free(self) -> None:
        """Free all. Collective."""
        for reducer in self._made:
            reducer.free()


class Kept(Freeable):
    """An object that keeps the heartbeat of a group, while tests make and free others.

    The first object of a group starts it and the last one stops it. That takes half of
    the processor time of a test that makes a small reducer.
    """

    def __init__(self, group: Group) -> None:
        self._register(group, "kept by the tests")

    def _free(self) -> None:
        """It has nothing else."""


# MPI frees them when the communicator is freed for which they were made.
_MADE_UP: dict[str, int] = {}


def made_up(comm: MPI.Intracomm, nodes: str) -> Group:
    """Return the group of a communicator that believes it is on such nodes. Collective.

    All tests that share the communicator share the group. If its ranks share no memory,
    each is on a node of its own.
    """
    if not group_of(comm).single_node:
        nodes = "singles"
    if nodes not in _MADE_UP:
        _MADE_UP[nodes] = MPI.Comm.Create_keyval(
            delete_fn=lambda _comm, _key, kept: _end(*kept)
        )
    kept = comm.Get_attr(_MADE_UP[nodes])
    if kept is None:
        own = comm.Split(NODES[nodes](comm.rank, comm.size), comm.rank)
        group = Group(comm.Dup(), own)
        assert not group.single_node
        kept = group, Kept(group)
        comm.Set_attr(_MADE_UP[nodes], kept)
    return kept[0]


def _end(group: Group, kept: Kept) -> None:
    kept.free()
    group.free()


def model(
    parts: Sequence[Any],
    nodes: Sequence[Sequence[int]],
    dtype: Any,
    *,
    mean: bool = True,
    wire: Any = None,
) -> Any:
    """Sum the ranks of each node in their order, then the nodes, with NumPy only."""
    wide = accumulation_dtype(np.dtype(dtype))

    def rounded(array: Any) -> Any:
        return array if wire is None else array.astype(wire).astype(wide)

    with np.errstate(all="ignore"):
        inputs = [np.asarray(part).astype(dtype).astype(wide) for part in parts]
        sums = [
            rounded(functools.reduce(np.add, [inputs[rank] for rank in ranks]))
            for ranks in nodes
        ]
        total = np.asarray(functools.reduce(np.add, sums))
        return rounded(np.asarray(total / wide.type(len(parts) if mean else 1)))


def drawn(shapes: Any, *seed: int, dtype: Any = np.float64) -> dict[str, Any]:
    """Return arrays that depend on the seed only, the same on every rank."""
    random = np.random.default_rng(seed)
    return {
        name: np.asarray(random.normal(size=shape)).astype(dtype)
        for name, shape in shapes.items()
    }


def parts_of(shapes: Any, size: int, *seed: int, dtype: Any) -> list[dict[str, Any]]:
    """Return the drawn arrays of all ranks."""
    return [drawn(shapes, rank, *seed, dtype=dtype) for rank in range(size)]


def check(maker: Maker, found: Any, parts: Any, dtype: Any, **options: Any) -> None:
    """Compare results, here or on a device, with the reduction of arrays of all."""
    assert set(found) == set(parts[0])
    for name, array in found.items():
        expected = maker.expected([part[name] for part in parts], dtype, **options)
        maker.check(array.get() if hasattr(array, "get") else array, expected)


def works(reducer, size):
    """Check that a reducer still works, after an error."""
    for given in (ONES, None):
        if given is None:
            for name, array in reducer.arrays().items():
                array[...] = ONES[name]
        found = reducer.reduce(given, reduction_type="SUM", step=1)
        assert all((array == size).all() for array in found.values())
    for name, array in ONES.items():
        reducer.start(name, array)
    assert (reducer.wait()["x"] == 1).all()


@pytest.fixture(name="makers")
def makers_fixture(comm: MPI.Intracomm) -> Any:
    """Make reducers of each kind that these ranks can use, and free them."""
    makers = []
    for kind in KINDS:
        with contextlib.suppress(pytest.skip.Exception):
            makers.append(Maker(comm, kind))
    yield makers
    for maker in makers:
        maker.free()


@pytest.fixture(name="maker")
def maker_fixture(comm: MPI.Intracomm, request: pytest.FixtureRequest) -> Any:
    """Make reducers of the kind that the test names, and free them."""
    kind, *nodes = request.param.split()
    if kind == "nccl":
        request.getfixturevalue("own_card")
    maker = Maker(comm, kind, *nodes)
    yield maker
    maker.free()
