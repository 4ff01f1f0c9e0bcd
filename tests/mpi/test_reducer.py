"""Reducer: its arrays and results, and its statistics."""

import os

import ml_dtypes
import numpy as np
import pytest

from hpcaccum import FreedError, Group, Layout, Reducer, group_of

from .reducing import ALL, KINDS, SMALL, drawn

SHAPES = {"scalar": (), "empty": (0,), "vector": (330,), "matrix": (15, 17)}
LARGE = pytest.mark.parametrize(
    "maker", ["shared", "staged", "hierarchical"], indirect=True
)


@pytest.fixture
def group(comm):
    return group_of(comm)


@pytest.mark.parametrize("given", ["group", "comm", "nothing"])
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
def test_whose_memory_arrays_and_results_are(maker, rank):
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
def test_steps_are_numbers_of_any_size_and_kind(maker):
    shapes = {str(n): (3,) for n in range(70)}
    reducer = maker(shapes)
    for step in 2**62, -(2**62), np.int64(7), np.int64(2**62):
        value = float(step % 5 + 1)
        found = reducer.reduce({name: np.full(3, value) for name in shapes}, step=step)
        assert (found["69"] == value).all(), step


@ALL
def test_calls_of_two_reducers_may_overlap(maker, size):
    one, two = (maker({"x": (700,)}, reduction_type="SUM") for _ in range(2))
    one.start("x", np.ones(700))
    found = two.reduce({"x": np.full(700, 2)})["x"]

    assert (one.wait()["x"] == size).all()
    assert (found == 2 * size).all()


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
