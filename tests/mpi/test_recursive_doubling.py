"""Sums of short vectors by messages between pairs of ranks."""

from __future__ import annotations

import numpy as np
import pytest

from hpcaccum.reducer.recursive_doubling import RecursiveDoubling

from .support import meet


@pytest.fixture
def sums(comm):
    made = RecursiveDoubling(comm, 5, np.dtype(np.float32))
    yield made
    meet()
    made.free()


def call(sums, vector, number, weight):
    sums.vector[:] = vector
    sums.begin(number, weight)
    while not sums.test():
        pass
    return sums.vector.copy()


def test_all_ranks_have_the_same_bits_in_each_call(sums, rank, size):
    vectors = np.random.default_rng(7).normal(size=(size, 5)).astype(np.float32)

    found = [call(sums, vectors[rank], 3, rank + 1.0) for _ in range(20)]

    assert len({each.tobytes() for rank in meet(found) for each in rank}) == 1
    np.testing.assert_allclose(found[0], vectors.sum(axis=0), rtol=1e-5)
    assert sums.weight == size * (size + 1) / 2
    assert sums.agreed


@pytest.mark.ranks(min=2)
def test_every_rank_learns_that_one_number_differs(sums, rank, size):
    for other in range(size):
        for number in 1, -1, 1 << 62:
            call(sums, np.zeros(5), number if rank == other else 0, 1.0)
            assert meet(sums.agreed) == [False] * size
            call(sums, np.zeros(5), number, 1.0)
            assert meet(sums.agreed) == [True] * size


def test_an_overflow_is_infinity_without_a_warning(sums, size):
    found = call(sums, np.finfo(np.float32).max, 0, 1.0)

    assert np.isinf(found).all() == (size > 1)
