"""Cores of a rank, and where a take stores its result."""

from __future__ import annotations

import os

import numpy as np
import pytest

import hpcaccum as hpc

from .acting import acc_fixture, at, make_fixture, meet, same_bits  # noqa: F401
from .support import WAIT

pytestmark = pytest.mark.any_size

INVALID = hpc.InvalidArgumentError


def test_cores_are_shared_with_ranks_that_may_run_on_them(comm, monkeypatch):
    ranks, found = hpc.group_of(comm).node.size, []
    for cores in (ranks, 2 * ranks, 5 * ranks - 1, 1):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, n=cores: set(range(n)))
        group = hpc.Group(comm.Dup())
        found.append(group.own_cores)
        group.free()

    assert found == [1, 2, 4, 1]


def test_cores_of_ranks_that_are_bound_are_their_own(comm, rank, monkeypatch):
    mine = set(range(3 * rank, 3 * rank + 3))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: mine)
    group = hpc.Group(comm.Dup())
    group.free()

    assert group.own_cores == 3


def test_the_least_share_of_cores_is_known_to_all(comm, rank, monkeypatch):
    own = set(range(100 * rank, 100 * rank + 2 + rank))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: own)
    group = hpc.Group(comm.Dup())
    group.free()

    assert (group.own_cores, group.least_cores) == (2 + rank, 2)


# Where a take leaves its result


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("storage", ["slots", "sum"])
def test_a_result_goes_where_it_is_wanted(make, dtype, storage):
    acc = make(dtype, (2, 3), storage=storage)
    grads = [np.full((2, 3), value, dtype) for value in (1, 2, 6)]
    for step in range(3):
        for rank, grad in enumerate(grads):
            at(rank, acc.apply_grad, grad, step)

        def take():
            out = np.full((2, 3), np.nan, dtype)
            return out, acc.take_grad(3, timeout=WAIT, out=out) is out

        found, same = at(step, take)
        assert same
        same_bits(found, np.full((2, 3), 3, dtype))


UNFIT = {
    "a list": [0.0, 0.0],
    "float32": np.zeros(2, np.float32),
    "(3,)": np.zeros(3),
    "contiguous": np.zeros(4)[::2],
    "writable": np.frombuffer(bytes(16)),
}


@pytest.mark.parametrize("text", UNFIT)
@pytest.mark.parametrize("shape", [(2,), None], ids=["fixed", "free"])
def test_a_result_that_fits_nowhere_is_not_lost(make, text, shape):
    acc = make(shape=shape, **({} if shape else {"capacity": 4}))
    at(0, acc.apply_grad, np.array([1.0, 2.0]))
    with pytest.raises(INVALID, match=r"^out must be"):
        at(1, acc.take_grad, 1, timeout=WAIT, out=UNFIT[text])

    assert at(2, acc.num_accumulated) == 1
    same_bits(at(2, acc.take_grad, 1, timeout=WAIT), [1.0, 2.0])


@pytest.mark.parametrize("storage", ["slots", "sum"])
def test_a_long_vector_is_summed_right(make, size, storage):
    length = 200_005  # several of the pieces that are summed at a time
    acc = make("float32", (length,), storage=storage)
    for step in range(3):
        for rank in range(size):
            value = np.float32(rank + step + 1)
            at(
                rank,
                lambda v=value, s=step: bool(acc.apply_grad(np.full(length, v), s)),
            )
        mean = np.float32(sum(range(step + 1, step + size + 1))) / np.float32(size)
        values = at(1, lambda: set(acc.take_grad(size, timeout=WAIT).tolist()))
        assert values == {float(mean)}
    meet()
