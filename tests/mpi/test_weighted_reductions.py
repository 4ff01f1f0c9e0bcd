"""Reductions with weights, of all schedules: sum(w a) / sum(w)."""

import numpy as np
import pytest

import hpcaccum as hpc

from .. import naive
from ..common import same_bits
from .reducing import ALL, EACH, SMALL
from .training import meet, raised

pytestmark = pytest.mark.any_size

SHAPES = {"scalar": (), "large": (23, 29), "empty": (0, 3), "vector": (33,)}
# One for each rank of a call; sums are exact in any order.
WEIGHTS = [(32, 8, 0.5, 4), (1, 1, 1, 1), (3, 1, 1, 1), (1, 1, 1, 7), (5, 5, 5, 5)]


def drawn(rank, call, dtype):
    rng = np.random.default_rng([rank, call])
    return {
        name: np.asarray(rng.integers(-32, 33, shape)).astype(dtype)
        for name, shape in SHAPES.items()
    }


def copied(reducer, arrays, **options):
    return reducer.reduce(arrays, **options)


def in_place(reducer, arrays, **options):
    own = reducer.arrays()
    for name, array in arrays.items():
        own[name][...] = array
    found = reducer.reduce(**options)
    for name, array in arrays.items():
        same_bits(own[name], array)  # not multiplied
    return found


def started(reducer, arrays, weight, **options):
    for name, array in arrays.items():
        reducer.start(name, array, weight=weight)
    return reducer.wait(weight=weight)


def started_elsewhere(reducer, arrays, weight, **options):
    reducer.copies_all = True
    return started(reducer, arrays, weight)


def viewed(reducer, arrays, **options):
    own = {name: each[...] for name, each in reducer.arrays().items()}
    for name, array in arrays.items():
        own[name][...] = array
    found = reducer.reduce(own, **options)
    for name, array in arrays.items():
        same_bits(own[name], array)  # not multiplied
    return found


def begun(reducer, arrays, weight, **options):
    """Start one array; reduce all others in place."""
    own = reducer.arrays()
    for name, array in arrays.items():
        if name == "large":
            reducer.start(name, array, weight=weight)
        else:
            own[name][...] = array
    return reducer.reduce(weight=weight)


def mixed(reducer, arrays, weight, **options):
    """Start some arrays in place and others not, and pass the last one."""
    own, (*names, last) = reducer.arrays(), arrays
    kept = names[reducer.calls // 2 % 2 :: 2]
    for name in names:
        if name in kept:
            own[name][...] = arrays[name]
        reducer.start(name, None if name in kept else arrays[name], weight=weight)
    found = reducer.reduce({last: arrays[last]}, weight=weight)
    for name in kept:
        same_bits(own[name], arrays[name])  # not multiplied
    return found


WAYS = copied, in_place, viewed, started, started_elsewhere, begun, mixed


@ALL
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_arrays_count_with_the_weight_of_their_rank(maker, rank, size, way, dtype):
    reducer, wide = maker(SHAPES, dtype), np.result_type(dtype, np.float32)
    for call, weights in enumerate([*WEIGHTS, None]):
        kinds = ["MEAN", "SUM"] if way in (copied, in_place, viewed) else ["MEAN"]
        used = [1.0] * size if weights is None else weights[:size]
        parts = [drawn(each, call, dtype) for each in range(size)]
        for kind in kinds:
            options = {"reduction_type": kind, "weight": used[rank]}
            if weights is None and len(kinds) == 2:
                del options["weight"]
            found = way(reducer, parts[rank], **options)
            assert reducer.total_weight == sum(used)
            for name, array in found.items():
                given = [part[name].astype(wide) for part in parts]
                maker.check(array, np.asarray(naive.allreduce(given, kind, used)))


@pytest.mark.parametrize("maker", ["hierarchical halves"], indirect=True)
@pytest.mark.parametrize("wire", ["float16", "bfloat16"])
def test_large_weights_fit_in_a_narrow_dtype(maker, rank, size, wire):
    reducer = maker({"x": (3 * SMALL,)}, wire_dtype=wire)
    weights = [60_000.0 + each for each in range(size)]
    parts = [np.full(3 * SMALL, each + 1, np.float32) for each in range(size)]
    found = reducer.reduce({"x": parts[rank]}, weight=weights[rank])["x"]
    expected = naive.allreduce(parts, weights=weights)
    np.testing.assert_allclose(found, expected, 0.02)


@EACH
@pytest.mark.parametrize("weight", [0, -1, float("nan"), float("inf"), "2", None])
def test_what_is_no_weight_is_an_error_of_all_ranks(maker, rank, size, weight):
    reducer = maker({"x": (900,)})
    given = {"x": np.ones(900)}
    error = raised(reducer.reduce, given, weight=weight if rank == size - 1 else 2)
    assert isinstance(error, hpc.InvalidArgumentError)
    assert "weight must be a finite number above 0" in str(error)
    assert (reducer.reduce(given, weight=2)["x"] == 1).all()


@EACH
def test_all_arrays_of_a_call_have_one_weight(maker, rank, size):
    reducer = maker({"x": (900,), "y": (9,)})
    x, y = np.ones(900), np.ones(9)
    reducer.start("x", x, weight=2)
    error = raised(reducer.start, "y", y, weight=3)
    assert "were started with weight 2" in str(error)
    meet()
    reducer.start("y", y, weight=2)
    error = raised(reducer.wait, weight=2 if rank else 3)
    assert isinstance(error, hpc.InvalidArgumentError)
    assert (reducer.reduce({"x": x, "y": y}, weight=rank + 1)["x"] == 1).all()
