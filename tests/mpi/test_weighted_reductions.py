"""Reductions with weights, of all schedules: sum(w a) / sum(w)."""

import itertools

import numpy as np
import pytest

import hpcaccum as hpc

from .. import naive
from ..common import same_bits
from .reducing import ALL, EACH, SMALL
from .test_schedules import WAYS, in_place
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


def all_in_place(reducer, arrays, weight):
    for name, array in arrays.items():
        reducer.arrays()[name][...] = array
    return reducer.reduce(weight=weight)


def viewed(reducer, arrays, weight):
    own = {name: each[...] for name, each in reducer.arrays().items()}
    for name, array in arrays.items():
        own[name][...] = array
    return reducer.reduce(own, weight=weight)


def begun(reducer, arrays, weight):
    """Start one array; reduce all others in place."""
    for name, array in arrays.items():
        if name == "large":
            reducer.start(name, array, weight=weight)
        else:
            reducer.arrays()[name][...] = array
    return reducer.reduce(weight=weight)


def started_elsewhere(reducer, arrays, weight):
    reducer.copies_all = True
    for name, array in arrays.items():
        reducer.start(name, array, weight=weight)
    found = reducer.wait(weight=weight)
    reducer.copies_all = False
    return found


IN_PLACE = in_place, all_in_place, viewed, begun
ALL_WAYS = [*WAYS, *IN_PLACE[1:], started_elsewhere]


@ALL
@pytest.mark.parametrize("reduction", ["MEAN", "SUM"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_arrays_count_with_the_weight_of_their_rank(
    maker, rank, size, dtype, reduction
):
    reducer = maker(SHAPES, dtype, reduction_type=reduction)
    for call, (way, weights) in enumerate(itertools.product(ALL_WAYS, WEIGHTS)):
        parts, weights = [drawn(r, call, dtype) for r in range(size)], weights[:size]
        found = way(reducer, parts[rank], weights[rank])
        assert reducer.total_weight == sum(weights)
        for name, array in found.items():
            given = [part[name].astype(array.dtype) for part in parts]
            maker.check(array, np.asarray(naive.allreduce(given, reduction, weights)))
        for name, array in reducer.arrays().items():
            if way in IN_PLACE and (way, name) != (begun, "large"):
                same_bits(array, parts[rank][name])  # not multiplied


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
