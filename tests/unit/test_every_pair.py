"""The choice of cases for tests with several parameters."""

from __future__ import annotations

import itertools

import pytest

from ..common import every_pair


@pytest.mark.parametrize(
    ("sizes", "most"),
    [((2, 3), 6), ((2, 3, 5), 15), ((2, 2, 2), 4), ((4, 10, 2), 40), ((5, 3, 3), 15)],
)
def test_all_pairs_are_there_and_few_cases(sizes, most):
    dimensions = [
        [f"{letter}{n}" for n in range(size)]
        for letter, size in zip("abc", sizes, strict=False)
    ]
    cases = every_pair(*dimensions)

    found = {pair for case in cases for pair in itertools.combinations(case, 2)}
    for one, other in itertools.combinations(dimensions, 2):
        assert {*itertools.product(one, other)} <= found
    assert len(cases) == len({*cases}) <= most
