"""Schedules: which is chosen."""

from __future__ import annotations

import numpy as np
import pytest

from hpcaccum import InvalidArgumentError
from hpcaccum.reducer import selection
from hpcaccum.reducer.schedule import Case

KIB = 1 << 10
ONE = Case(4, 1, 1, KIB, None, None, cuda_aware=False)
SEVERAL = ONE._replace(nodes=2)
SINGLES = ONE._replace(nodes=4)
LARGE = {"nbytes": 512 * KIB}
WIRE = {"wire_dtype": np.dtype(np.float16)}


@pytest.mark.parametrize(
    ("schedule", "case", "expected"),
    [
        ("auto", ONE, "OneShot"),
        ("auto", ONE._replace(nbytes=32 * KIB), "OneShot"),
        ("auto", ONE._replace(nbytes=33 * KIB), "TwoShot"),
        ("auto", ONE._replace(bucket_bytes=KIB), "TwoShot"),
        ("auto", ONE._replace(**WIRE), "OneShot"),
        ("auto", SEVERAL, "SmallFlat"),
        ("auto", SEVERAL._replace(nbytes=65 * KIB), "Flat"),
        ("auto", SEVERAL._replace(nbytes=2 * KIB, bucket_bytes=KIB), "Flat"),
        ("auto", SEVERAL._replace(**LARGE), "Hierarchical"),
        ("auto", SEVERAL._replace(**WIRE), "Hierarchical"),
        ("auto", SINGLES._replace(**LARGE), "Flat"),
        ("auto", SINGLES._replace(**LARGE, **WIRE), "Hierarchical"),
        ("shared", ONE, "OneShot"),
        ("shared", ONE._replace(**LARGE), "TwoShot"),
        ("hierarchical", ONE, "OneShot"),
        ("hierarchical", ONE._replace(**LARGE, **WIRE), "TwoShot"),
        ("hierarchical", SEVERAL, "Hierarchical"),
        ("hierarchical", SINGLES, "Hierarchical"),
        ("flat", ONE, "SmallFlat"),
        ("flat", SEVERAL._replace(**LARGE), "Flat"),
        ("flat", ONE._replace(cuda_aware=True), "Blocking"),
        ("nccl", ONE._replace(**LARGE), "Nccl"),
    ],
    ids=str,
)
def test_choice(schedule, case, expected):
    assert selection.choose(schedule, case).__name__ == expected


def test_shared_memory_needs_one_node():
    with pytest.raises(
        InvalidArgumentError, match=r"'shared' needs all ranks on one node, .* on 4"
    ):
        selection.choose("shared", SINGLES)
    with pytest.raises(InvalidArgumentError, match=r"'nccl' needs all ranks on one"):
        selection.choose("nccl", SEVERAL)
