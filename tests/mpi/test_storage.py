"""The sum of gradients: in rank order, by chunks, by as many threads as there are."""

from __future__ import annotations

import os

import ml_dtypes
import numpy as np
import pytest

import hpcaccum as hpc
from hpcaccum import summation as module
from hpcaccum.summation import add_in_order, divide

from .acting import acc_fixture, at, make_fixture, meet, same_bits  # noqa: F401
from .support import WAIT

INVALID = hpc.InvalidArgumentError


@pytest.fixture
def small(monkeypatch):
    """Chunks of 64 elements, and a thread for every 100."""
    monkeypatch.setattr(module, "_CHUNK", 64)
    monkeypatch.setattr(module, "_SHARE", 100)


def vectors(number, size=1001, dtype=np.float32):
    rng = np.random.default_rng(number)
    return [rng.normal(size=size).astype(dtype) for _ in range(number)]


def in_order(parts, divisor, dtype):
    """Return the sum by definition."""
    total = parts[0].astype(dtype)
    for part in parts[1:]:
        total = total + part.astype(dtype)
    return total / dtype(divisor)


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
@pytest.mark.parametrize("number", [1, 2, 5])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_any_number_of_threads_gives_the_same_bits(small, threads, number, dtype):
    parts = vectors(number, dtype=dtype)
    wide = np.result_type(dtype, np.float32).type
    for divisor in (1, 3, 4):
        out = np.full(1001, np.nan, wide)
        add_in_order(parts, out, divisor, threads)
        same_bits(out, in_order(parts, divisor, wide))


def test_each_thread_has_its_share(small, monkeypatch):
    used, add = [], module._add_chunks

    def watched(parts, out, divisor):
        used.append(out.size)
        add(parts, out, divisor)

    monkeypatch.setattr(module, "_add_chunks", watched)
    add_in_order(vectors(2), np.empty(1001, np.float32), 1, 4)
    assert sorted(used) == [248, 251, 251, 251]
    used.clear()
    add_in_order(vectors(2, 100), np.empty(100, np.float32), 1, 4)
    assert used == [100]


def test_error_of_a_thread_is_raised(small, monkeypatch):
    def broken(parts, out, divisor):
        if out.size == 500:
            raise MemoryError("of a thread")

    monkeypatch.setattr(module, "_add_chunks", broken)
    with pytest.raises(MemoryError, match="of a thread"):
        add_in_order(vectors(2), np.empty(1001, np.float32), 1, 2)


def test_threads_are_as_silent_about_infinity(small):
    huge = np.full(1001, np.finfo(np.float32).max)
    out = np.empty_like(huge)
    with np.errstate(all="ignore"):
        add_in_order([huge, huge], out, 1, 3)

    assert np.isinf(out).all()


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=str)
@pytest.mark.parametrize("threads", [1, 3])
def test_a_narrower_result_is_rounded_once(small, dtype, threads):
    parts = vectors(4)
    out = np.empty(1001, dtype)
    add_in_order(parts, out, 3, threads)

    same_bits(out, in_order(parts, 3, np.float32).astype(dtype))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("count", [1, 2, 3, 64, 1 << 20, (1 << 20) - 1])
def test_division_is_true_division(dtype, count):
    info = np.finfo(dtype)
    edges = [
        0,
        -0.0,
        info.max,
        info.tiny,
        info.smallest_subnormal,
        np.inf,
        3 * info.eps,
    ]
    total = np.concatenate([vectors(1, dtype=dtype)[0], np.array(edges, dtype)])
    expected = total / dtype(count)
    divide(total, count)

    same_bits(total, expected)


def test_cores_are_shared_with_ranks_that_may_run_on_them(comm, monkeypatch):
    group, found = hpc.Group.of(comm), []
    ranks = group.node.size
    for cores in (ranks, 2 * ranks, 5 * ranks - 1, 1):
        vars(group).pop("own_cores", None)
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, n=cores: set(range(n)))
        found.append(group.own_cores)
    del vars(group)["own_cores"]

    assert found == [1, 2, 4, 1]


def test_cores_of_ranks_that_are_bound_are_their_own(comm, rank, monkeypatch):
    group = hpc.Group.of(comm)
    vars(group).pop("own_cores", None)
    mine = set(range(3 * rank, 3 * rank + 3))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: mine)
    assert group.own_cores == 3
    del vars(group)["own_cores"]


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
    length = 3 * module._CHUNK + 5
    acc = make("float32", (length,), storage=storage)
    for step in range(3):
        for rank in range(size):
            value = np.float32(rank + step + 1)
            at(
                rank,
                lambda v=value, s=step: bool(acc.apply_grad(np.full(length, v), s)),
            )
        mean = np.float32(sum(range(step + 1, step + size + 1))) / np.float32(size)
        told = at(1, lambda: set(acc.take_grad(size, timeout=WAIT).tolist()))
        assert told == {float(mean)}
    meet()
