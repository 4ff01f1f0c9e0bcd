"""The sizes of ``hpcaccum bench --sizes``."""

from __future__ import annotations

import argparse

import pytest

from hpcaccum.bench.options import add_arguments, sizes, sizes_of

K, M = 1 << 10, 1 << 20

GOOD = {
    "128": [128],
    "4K": [4 * K],
    "1GiB": [1 << 30],
    "1K,4K": [K, 4 * K],
    "4K:1M": [4 * K, 16 * K, 64 * K, 256 * K, M],
    "4K:1023K": [4 * K, 16 * K, 64 * K, 256 * K],
    "4K:32K:2": [4 * K, 8 * K, 16 * K, 32 * K],
    "1K:1M:1024": [K, M],
    "4K:4K": [4 * K],
    "1K,4K:16K,1M": [K, 4 * K, 16 * K, M],
}


@pytest.mark.parametrize("text", GOOD)
def test_sizes_and_ranges(text):
    assert sizes(text) == GOOD[text]


BAD = {
    "": "must be a number, optionally with K, M or G, ",
    "4K,": "or a range such as 4K:256M or 4K:256M:2, got ''",
    "4K:": "or a range such as 4K:256M or 4K:256M:2, got '4K:'",
    ":4K": "or a range such as 4K:256M or 4K:256M:2, got ':4K'",
    "4X:1M": "or a range such as 4K:256M or 4K:256M:2, got '4X:1M'",
    "100:1M": "must be a multiple of 128 bytes, got '100:1M'",
    "1M:4K": "must be a range from a smaller to a larger size, ",
    "4K:1M:1": "with a factor from 2 on, got '4K:1M:1'",
    "4K:1M:0": "with a factor from 2 on, got '4K:1M:0'",
    "4K:1M:-2": "a range such as 4K:256M or 4K:256M:2, got '4K:1M:-2'",
    "4K:1M:2:2": "a range such as 4K:256M or 4K:256M:2, got '4K:1M:2:2'",
}


@pytest.mark.parametrize("text", BAD)
def test_what_is_no_size(text):
    with pytest.raises(argparse.ArgumentTypeError) as error:
        sizes(text)

    assert BAD[text] in str(error.value)


def test_each_size_is_measured_once():
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    words = ["allreduce", "--sizes", "1K,4K:16K", "4K:64K", "256K"]
    found = sizes_of(parser.parse_args(words).sizes, "allreduce")

    assert found == [K, 4 * K, 16 * K, 64 * K, 256 * K]
