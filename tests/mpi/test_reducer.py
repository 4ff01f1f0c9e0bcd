"""Reducer: sums against NumPy, and every way in which ranks can fail to match."""

from __future__ import annotations

import re
import time

import ml_dtypes
import numpy as np
import pytest

from hpcaccum import (
    DisagreementError,
    FreedError,
    Group,
    InvalidArgumentError,
    Layout,
    Reducer,
    WaitTimeoutError,
)

from .support import WAIT
from .training import meet, raised

SHAPES = {"scalar": (), "empty": (0,), "vector": (33,), "matrix": (5, 7)}


@pytest.fixture(autouse=True)
def limit(monkeypatch):
    monkeypatch.setenv("HPCACCUM_TIMEOUT", str(WAIT))


@pytest.fixture
def group(comm):
    return Group.of(comm)


def make(group, shapes=None, dtype=np.float64):
    return Reducer(Layout({"x": (3,)} if shapes is None else shapes, dtype), group)


def drawn(rank, call):
    random = np.random.default_rng([rank, call])
    return {name: random.normal(size=shape) for name, shape in SHAPES.items()}


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_sums_equal_numpy(group, rank, size, dtype):
    reducer = make(group, SHAPES, dtype)
    arrays = reducer.arrays()
    for call in range(3):
        for name, array in drawn(rank, call).items():
            arrays[name][...] = array
        reducer.reduce()

        for name in SHAPES:
            parts = [drawn(r, call)[name].astype(dtype) for r in range(size)]
            error = 1e-6 if dtype == np.float32 else 1e-14
            np.testing.assert_allclose(arrays[name], sum(parts), error, error)
            assert arrays[name].dtype == dtype
            assert arrays[name].shape == SHAPES[name]
    reducer.free()


def test_all_ranks_have_the_same_bits_every_time(group, rank):
    reducer = make(group, {"x": (1000,)}, np.float32)
    array = reducer.arrays()["x"]
    bits = set()
    for _ in range(3):
        array[:] = np.random.default_rng(rank).normal(size=1000)
        reducer.reduce()
        bits |= set(meet(array.tobytes()))
    reducer.free()

    assert len(bits) == 1


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=str)
def test_half_precision_is_summed_in_single(group, rank, size, dtype):
    value = np.asarray(4096.0 if rank == 0 else 1.0, dtype)
    reducer = Reducer(Layout.of({"x": value}), group)
    reducer.arrays()["x"][...] = value
    reducer.reduce()
    found = reducer.arrays()["x"]
    reducer.free()

    assert found.dtype == np.float32
    assert found == 4096 + size - 1


def test_more_calls_than_the_check_can_count(group, size):
    reducer = make(group)
    for step in range(140):
        reducer.arrays()["x"][:] = step
        reducer.reduce(step=step)
        assert (reducer.arrays()["x"] == step * size).all()
    reducer.free()


def test_infinity_and_nan_are_sums_like_others(group, rank):
    reducer = make(group)
    reducer.arrays()["x"][:] = np.inf, np.nan if rank == 0 else 1, 1
    reducer.reduce()
    found = reducer.arrays()["x"].copy()
    reducer.free()

    assert found[0] == np.inf
    assert np.isnan(found[1])


def test_arrays_that_nobody_brings_are_left_out(group, size):
    reducer = make(group, {"x": (), "y": ()})
    reducer.arrays()["y"][...] = 2
    reducer.reduce({"y"})
    found = reducer.arrays()["y"].copy()
    reducer.free()

    assert found == 2 * size


@pytest.mark.ranks(min=2)
def test_an_array_that_only_some_bring_is_an_error_on_all(group, rank, size):
    reducer = make(group, {"x": (), "y": ()})
    error = raised(reducer.reduce, {"x", "y"} if rank < size - 1 else {"x"})
    reducer.arrays()["y"][...] = 1
    reducer.reduce()
    found = reducer.arrays()["y"].copy()
    reducer.free()

    assert type(error) is DisagreementError
    assert "gradient of y must be the same" in str(error)
    assert f"rank 0 has one, rank {size - 1} has none" in str(error)
    assert found == size


@pytest.mark.ranks(min=2)
def test_a_rank_at_another_step_is_found(group, rank, size):
    reducer = make(group)
    reducer.reduce(step=3)
    error = raised(reducer.reduce, step=4 if rank < size - 1 else 5)
    reducer.free()

    assert type(error) is DisagreementError
    assert f"step must be the same on all {size} ranks" in str(error)
    assert f"rank 0 has 4, rank {size - 1} has 5" in str(error)


@pytest.mark.ranks(min=3)
def test_steps_that_cancel_out_in_the_sum_are_found(group, rank):
    reducer = make(group)
    steps = {0: 4, 1: 6}
    error = raised(reducer.reduce, step=steps.get(rank, 5))
    reducer.free()

    assert type(error) is DisagreementError


@pytest.mark.ranks(min=2)
def test_a_rank_that_does_not_come_is_named(group, rank, size, monkeypatch):
    reducer = make(group)
    reducer.reduce()
    monkeypatch.setenv("HPCACCUM_TIMEOUT", "0.2")
    error = raised(reducer.reduce) if rank != 0 else None
    meet()
    monkeypatch.setenv("HPCACCUM_TIMEOUT", str(WAIT))
    # What the others began and gave up. Their sums are lost, and they must know.
    again = raised(reducer.reduce)
    reducer.free()

    if rank == 0:
        assert again is None
    else:
        assert type(error) is type(again) is WaitTimeoutError
        assert re.search(rf"allreduce 2: waited \S+ s for rank 0 of {size}", str(error))
        assert "allreduce 2 was given up" in str(again)


@pytest.mark.ranks(min=2)
def test_two_reducers_of_one_group_are_never_mixed(group, rank, monkeypatch):
    reducers = [make(group), make(group)]
    monkeypatch.setenv("HPCACCUM_TIMEOUT", "0.2")
    mine = reducers if rank == 0 else reducers[::-1]
    mine[0].arrays()["x"][:] = 1 if rank == 0 else 10
    error = raised(mine[0].reduce)
    meet()
    monkeypatch.setenv("HPCACCUM_TIMEOUT", str(WAIT))
    mine[1].reduce()
    for reducer in reducers:
        reducer.free()

    assert type(error) is WaitTimeoutError


@pytest.mark.parametrize("which", ["first", "last"])
@pytest.mark.parametrize(
    ("error", "known"),
    [
        (InvalidArgumentError("no"), True),
        (TypeError("no"), True),
        (KeyError("no"), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_failure_of_one_rank_is_raised_on_all(group, rank, size, which, error, known):
    failing = 0 if which == "first" else size - 1
    reducer = make(group)
    found = raised(reducer.fail, error) if rank == failing else raised(reducer.reduce)
    reducer.arrays()["x"][:] = 1
    reducer.reduce()
    sums = reducer.arrays()["x"].copy()
    reducer.free()

    if rank == failing:
        assert found is error
    else:
        assert type(found) is (type(error) if known else RuntimeError)
        assert f"rank {failing}" in str(found)
        assert "no" in str(found)
    assert (sums == size).all()


@pytest.mark.ranks(min=2)
def test_different_layouts_are_refused_on_all(group, rank):
    shape = (3,) if rank == 0 else (4,)

    with pytest.raises(DisagreementError, match="names, shapes and dtype"):
        make(group, {"x": shape})


@pytest.mark.ranks(min=2)
def test_groups_sum_apart(group, rank, size):
    part = group.split([[size - 1], list(range(size - 1))])
    reducer = make(part)
    reducer.arrays()["x"][:] = rank + 1
    reducer.reduce()
    found = reducer.arrays()["x"].copy()
    reducer.free()
    part.free()

    assert (found == (size if rank == size - 1 else size * (size - 1) / 2)).all()


@pytest.mark.ranks(min=2)
def test_waiting_for_others_is_counted(group, rank):
    reducer = make(group)
    meet()
    if rank == 0:
        time.sleep(0.2)
    reducer.reduce()
    waited = reducer.waited
    reducer.free()

    assert rank == 0 or waited > 0.05


def test_a_freed_reducer_is_of_no_use(group):
    reducer = make(group)
    reducer.free()
    reducer.free()

    with pytest.raises(FreedError):
        reducer.reduce()
    with pytest.raises(FreedError):
        reducer.fail(TypeError())
