"""Sums between nodes: pieces of any size, and interleaved calls."""

from __future__ import annotations

import numpy as np
import pytest

from ..common import every_pair
from .reducing import Maker, drawn

pytestmark = pytest.mark.ranks(min=2)


NODES = "singles", "halves", "uneven"


@pytest.fixture(name="maker", params=NODES)
def maker_fixture(comm, request):
    maker = Maker(comm, "hierarchical", request.param)
    yield maker
    maker.free()


def reduced(maker, reducer, rank, size, length, call, **options):
    """Reduce drawn vectors, and compare the mean with the model bit by bit."""
    parts = [drawn({"x": (length,)}, r, call, dtype=np.float32) for r in range(size)]
    found = reducer.reduce(parts[rank])
    expected = maker.expected([part["x"] for part in parts], np.float32, **options)
    maker.check(found["x"], expected)


# Elements: fewer than there are nodes, pieces that differ by one, many buckets.
LENGTHS = 1, 3, 257, 5 * 256 + 3


@pytest.mark.parametrize(
    ("maker", "length", "wire"),
    every_pair(NODES, LENGTHS, [None, "float16"]),
    indirect=["maker"],
)
def test_pieces_of_any_size(maker, rank, size, length, wire):
    reducer = maker({"x": (length,)}, wire_dtype=wire)
    for call in range(3):
        reduced(maker, reducer, rank, size, length, call, wire=wire)


def test_calls_of_two_reducers_in_turn(maker, rank, size):
    reducers = [maker({"x": (length,)}) for length in (700, 3)]
    for call in range(10):
        for reducer, length in zip(reducers, (700, 3), strict=True):
            reduced(maker, reducer, rank, size, length, call)


def test_a_reduction_that_began_while_another_one_is_made(maker, rank, size):
    early, late = maker({"x": (900,)}), maker({"x": (900,)})
    for call in range(5):
        parts = [drawn({"x": (900,)}, r, call, dtype=np.float32) for r in range(size)]
        early.start("x", parts[rank]["x"])
        reduced(maker, late, rank, size, 900, call + 10)
        expected = maker.expected([part["x"] for part in parts], np.float32)
        maker.check(early.wait()["x"], expected)
