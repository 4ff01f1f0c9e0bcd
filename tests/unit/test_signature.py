"""Signatures that travel among the data which are summed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hpcaccum.reducer.signature import Digits

WORDS = st.integers(0, 2**64 - 1)


def summed(digits, numbers, dtype):
    """What MPI's sum gives each rank; None if it depends on the order."""
    sent = [np.frombuffer(digits.of(number)[0], dtype) for number in numbers]
    sums = np.sum(sent, 0, np.float64)
    assert (sums <= 2.0 ** (np.finfo(dtype).nmant + 1)).all()
    return sums.astype(dtype).tobytes()


@given(st.lists(WORDS, min_size=2, max_size=9), st.sampled_from(["f4", "f8"]))
# The sums are those of the first: 1 + 3 + 2, but 1 + 9 + 4 is more than 3 * 2**2.
@example([2, 1, 3], "f4")
def test_only_equal_numbers_agree(numbers, dtype):
    digits = Digits(len(numbers), np.dtype(dtype))
    found = summed(digits, numbers, dtype)
    verdicts = [found == digits.of(number)[1] for number in numbers]

    assert verdicts == [len(set(numbers)) == 1] * len(numbers)


@given(WORDS, WORDS)
@pytest.mark.parametrize("ranks", [1, 2, 258, 259, 74000, 75000, 1 << 20])
def test_sums_over_many_ranks_are_exact(ranks, number, other):
    digits = Digits(ranks, np.dtype("f4"))
    own, most = (np.frombuffer(each, "f4") for each in digits.of(2**64 - 1))

    assert most.max() <= 2**24
    assert (most == own.astype(float) * ranks).all()
    assert (digits.of(number)[1] == digits.of(other)[1]) == (number == other)
