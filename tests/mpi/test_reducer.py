"""Reducer: its arrays and results, and its statistics."""

from __future__ import annotations

import os
import time

import ml_dtypes
import numpy as np
import pytest

from hpcaccum import FreedError, Group, Layout, Reducer, group_of

from .reducing import (
    ALL,
    KINDS,
    SMALL,
    drawn,
    maker_fixture,  # noqa: F401
)
from .support import for_some_pause
from .training import meet

SHAPES = {"scalar": (), "empty": (0,), "vector": (330,), "matrix": (15, 17)}
LARGE = pytest.mark.parametrize(
    "maker", ["shared", "staged", "hierarchical"], indirect=True
)


@pytest.fixture
def group(comm):
    return group_of(comm)


@pytest.mark.parametrize("given", ["comm", "nothing"])
@pytest.mark.parametrize("kind", ["group", "communicator"])
def test_it_reduces_over_the_group_that_it_is_given(comm, rank, size, kind, given):
    ranks = group_of(comm) if kind == "group" else comm
    options = {} if given == "nothing" else {given: ranks}
    with Reducer(Layout({"x": (3,)}, "float64"), **options) as reducer:
        assert reducer.reduce({"x": [rank] * 3})["x"].tolist() == [(size - 1) / 2] * 3


@ALL
def test_arrays_are_the_layouts_and_results_wide(maker):
    for dtype in ("float16", ml_dtypes.bfloat16, "float64"):
        reducer = maker(SHAPES, dtype)
        arrays, results = reducer.arrays(), reducer.results()

        assert {name: array.shape for name, array in arrays.items()} == SHAPES
        assert {name: array.shape for name, array in results.items()} == SHAPES
        assert {array.dtype for array in arrays.values()} == {np.dtype(dtype)}
        wide = np.float64 if dtype == "float64" else np.float32
        assert {array.dtype for array in results.values()} == {np.dtype(wide)}
        assert not any(array.any() for array in (*arrays.values(), *results.values()))


@ALL
def test_half_precision_is_summed_in_single(maker, rank, size):
    reducer = maker({"x": (300,)}, "float16", reduction_type="SUM")
    reducer.arrays()["x"][...] = 2048 if rank == 0 else 1

    assert (reducer.reduce()["x"] == 2048 + size - 1).all()


@ALL
def test_whose_memory_arrays_and_results_are(maker, rank, size):
    reducer = maker(SHAPES)
    results = reducer.results()
    # They are read-only, and always the same memory.
    assert reducer.reduce() is results
    with pytest.raises(TypeError):
        results["vector"] = np.ones(330)
    for array in (
        *results.values(),
        *reducer.reduce({"vector": np.ones(330)}).values(),
    ):
        assert not array.flags.writeable
    assert (results["vector"] == 1).all()
    # The dictionary of arrays is the caller's, and they keep what is written to them.
    reducer.arrays().clear()
    assert [*reducer.arrays()] == [*SHAPES]
    mine, untouched = (drawn(SHAPES, rank, dtype=np.float32) for _ in range(2))
    for name, array in reducer.arrays().items():
        array[...] = mine[name]
    first = {name: array.copy() for name, array in reducer.reduce().items()}
    again = reducer.reduce()
    for name, array in reducer.arrays().items():
        np.testing.assert_array_equal(array, mine[name])
        np.testing.assert_array_equal(again[name], first[name])
        # The next gradients may be written while results are read.
        array[...] = 100
        np.testing.assert_array_equal(again[name], first[name])
    # Sources are left as they are.
    for array in mine.values():
        array.flags.writeable = False
    reducer.reduce(mine)
    for name, array in mine.items():
        np.testing.assert_array_equal(array, untouched[name])


@ALL
def test_a_call_may_ask_for_another_reduction(maker, size):
    reducer = maker(SHAPES)
    ones = {name: np.ones(shape) for name, shape in SHAPES.items()}
    for kind in None, "SUM", "MEAN", "SUM":
        found = reducer.reduce(ones, reduction_type=kind)

        assert (found["vector"] == (size if kind == "SUM" else 1)).all(), kind
        assert (reducer.reduce(ones)["vector"] == 1).all(), kind
    for name in ones:
        reducer.start(name, ones[name])
    assert (reducer.wait()["vector"] == 1).all()


@ALL
def test_arrays_that_no_rank_contributes_are_left_out(maker, size):
    reducer = maker({"x": (400,), "y": (400,), "z": ()}, reduction_type="SUM")
    assert [*reducer.reduce({"y": np.ones(400)})] == ["y"]
    reducer.start("z", 2)
    found = reducer.wait()
    assert [*found] == ["z"]
    assert found["z"] == 2 * size
    assert reducer.reduce({}) == reducer.wait() == {}
    reducer.start("x", np.ones(400))
    assert (reducer.wait()["x"] == size).all()
    # One that was started may be in the call of the others.
    reducer.start("y", np.ones(400))
    found = reducer.reduce({"x": np.full(400, 2)})
    assert (found["x"] == 2 * size).all()
    assert (found["y"] == size).all()
    # Results are copied to floats of any kind.
    for dtype in ("float16", ml_dtypes.bfloat16, "float32", "float64"):
        out = np.zeros((400, 2), dtype)[:, 0]
        reducer.reduce({"x": np.ones(400)}, out={"x": out})
        assert (out == size).all()


@ALL
def test_many_calls_at_many_steps(maker, size):
    reducer = maker({"x": (3,)}, reduction_type="SUM")
    for step in range(60):
        reducer.arrays()["x"][:] = step
        assert (reducer.reduce(step=step - 30)["x"] == step * size).all()


@ALL
def test_steps_are_numbers_of_any_size_and_kind(maker, size):
    shapes = {str(n): (3,) for n in range(70)}
    reducer = maker(shapes)
    for step in 2**62, -(2**62), np.int64(7), np.int64(2**62):
        value = float(step % 5 + 1)
        found = reducer.reduce({name: np.full(3, value) for name in shapes}, step=step)
        assert (found["69"] == value).all(), step


@pytest.mark.ranks(min=2)
def test_groups_reduce_apart(group, rank, size):
    part = group.split([[size - 1], list(range(size - 1))])
    with Reducer(Layout({"x": (3,)}, "float64"), part, reduction_type="SUM") as reducer:
        found = reducer.reduce({"x": [rank + 1] * 3})["x"].copy()
        statistics = reducer.statistics()
    part.free()

    assert (found == (size if rank == size - 1 else size * (size - 1) / 2)).all()
    assert statistics.ranks == (1 if rank == size - 1 else size - 1)


@pytest.mark.parametrize("options", [{}, {"bucket_bytes": SMALL}, {"schedule": "flat"}])
def test_a_group_of_one_is_its_own_mean(group, rank, options):
    alone = group.split([[each] for each in range(group.size)])
    with Reducer(Layout({"x": (700,)}, "float16"), alone, **options) as reducer:
        for value in (rank, rank + 1):
            found = reducer.reduce({"x": np.full(700, value)})["x"]
            assert found.dtype == np.float32
            assert (found == value).all()
        out = {"x": np.zeros(700)}
        reducer.start("x", np.full(700, 3))
        reducer.wait(out=out)
        assert (out["x"] == 3).all()
    alone.free()


@ALL
def test_calls_of_two_reducers_may_overlap(maker, size):
    one, two = (maker({"x": (700,)}, reduction_type="SUM") for _ in range(2))
    one.start("x", np.ones(700))
    found = two.reduce({"x": np.full(700, 2)})["x"]

    assert (one.wait()["x"] == size).all()
    assert (found == 2 * size).all()


# Numbers


@ALL
def test_statistics(maker, size):
    reducer = maker({"x": (500,), "y": (3,)}, bucket_bytes=SMALL)
    before = reducer.statistics()
    reducer.reduce()
    after = reducer.statistics()

    kind = KINDS[maker.kind]["schedule"]
    if size == 1 and kind == "hierarchical":
        kind = "shared"  # there is nothing between nodes
    assert (before.schedule, before.ranks) == (kind, size)
    assert (before.nodes, before.buckets) == (len(maker.nodes), 3)
    assert (before.wire_dtype, before.calls, before.waited) == (None, 0, 0.0)
    assert after.calls == 1
    assert after.waited == reducer.waited > 0
    assert kind in repr(reducer)
    assert "1 calls" in repr(reducer)


@LARGE
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_gradient_is_held_once_a_rank_and_its_result_once_a_node(maker, rank, dtype):
    layout = Layout({"x": (5000,), "y": (3,)}, dtype)
    statistics = maker(layout.shapes, dtype).statistics()

    assert statistics.window_bytes == layout.nbytes
    first = any(rank == ranks[0] for ranks in maker.nodes)
    assert statistics.result_bytes <= (layout.size * 4 if first else 0)
    if first and any(rank in ranks for ranks in maker.nodes if len(ranks) > 1):
        assert statistics.result_bytes == layout.size * 4


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("maker", ["shared"], indirect=True)
def test_all_ranks_of_a_node_read_one_result(maker, rank):
    reducer = maker({"x": (400,)})
    reducer.reduce({"x": np.ones(400)})
    meet()
    if rank == 0:
        reducer._schedule.received[:] = 5
    meet()

    assert (reducer.results()["x"] == 5).all()


@ALL
@pytest.mark.ranks(min=2)
def test_time_spent_waiting_for_others_is_counted(maker, rank):
    reducer = maker({"x": (3,)})

    def waits_for_rank_0(seconds):
        before = reducer.waited
        meet()
        time.sleep(seconds * (rank == 0))
        reducer.reduce()
        return rank == 0 or reducer.waited - before > seconds / 2

    assert for_some_pause(waits_for_rank_0)


# The end


@ALL
def test_with_frees_it_unless_something_was_raised(maker):
    with pytest.raises(KeyError), maker({"x": (3,)}) as reducer:
        raise KeyError
    with reducer:
        reducer.reduce()
    reducer.free()
    for call in (
        reducer.reduce,
        reducer.wait,
        lambda: reducer.start("x"),
        lambda: reducer.fail(TypeError()),
    ):
        with pytest.raises(FreedError, match="was freed"):
            call()
    assert reducer.arrays() == {}
    assert dict(reducer.results()) == {}


@ALL
def test_arrays_and_results_may_change_places(maker, size):
    reducer = maker({"a": (5000,), "b": (5000,)}, reduction_type="SUM")
    own = reducer.arrays()
    own["a"][...], own["b"][...] = 1, 10
    found = reducer.reduce({"a": own["b"], "b": own["a"]})
    assert (found["a"] == 10 * size).all()
    assert (found["b"] == size).all()
    both = np.repeat(np.float32([1, 10]), 5000)
    a, b = both[:5000], both[5000:]
    reducer.reduce({"a": a, "b": b}, out={"a": b, "b": a})
    assert (a == 10 * size).all()
    assert (b == size).all()


@pytest.mark.ranks(min=3)
def test_only_some_nodes_have_fewer_cores_than_ranks(comm, rank, size, monkeypatch):
    # The last rank is alone on its node; the others share one core.
    last = rank == size - 1
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1} if last else {0})
    group = Group(comm.Dup(), comm.Split(last, rank))
    with Reducer(Layout({"x": (4,)}, "float32"), group) as reducer:
        reducer.arrays()["x"][...] = rank
        mean = reducer.reduce()["x"].copy()
    group.free()

    assert (mean == np.float32((size - 1) / 2)).all()
