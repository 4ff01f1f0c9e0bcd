"""Which schedule is chosen for which group, size and options."""

from __future__ import annotations

import numpy as np
import pytest

from hpcaccum import InvalidArgumentError
from hpcaccum.reducer import selection
from hpcaccum.reducer.flat import Flat
from hpcaccum.reducer.schedule import Case
from hpcaccum.reducer.two_shot import TwoShot

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


def check(schedule, wire_dtype=None, cuda_aware=False):
    selection.check_schedule(schedule, wire_dtype, cuda_aware, "raise", None)


def test_names_are_listed_in_messages():
    with pytest.raises(InvalidArgumentError, match=r"one of .*'auto', 'shared', 'hier"):
        check("ring")
    with pytest.raises(
        InvalidArgumentError,
        match="for schedule 'auto', 'shared' or 'hierarchical', not 'flat'",
    ):
        check("flat", wire_dtype="float16")
    with pytest.raises(
        InvalidArgumentError, match="for schedule 'flat', got 'auto': the others"
    ):
        check("auto", cuda_aware=True)


@pytest.mark.parametrize(
    ("cores", "nbytes", "expected"),
    [
        (1, 1 << 30, 2 << 20),
        (2, 4 << 20, 2 << 20),
        (2, 32 << 20, 8 << 20),
        (9, 1 << 30, 16 << 20),
    ],
)
def test_buckets_are_larger_where_threads_share_them(cores, nbytes, expected):
    case = ONE._replace(cores=cores, nbytes=nbytes)

    assert TwoShot.bucket_bytes(case) == expected
    assert Flat.bucket_bytes(case) == Flat.default_bucket_bytes
