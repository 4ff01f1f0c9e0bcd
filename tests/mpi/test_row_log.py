"""The log of rows that updates have changed: its last entries, or none."""

from __future__ import annotations

import numpy as np
import pytest

from hpcaccum import Group
from hpcaccum.server.parameter_copies import copy_rows
from hpcaccum.server.row_log import RowLog

from .acting import at
from .support import meet

SIZE = 8


@pytest.fixture
def log(comm):
    group = Group.of(comm)
    if not group.single_node:
        pytest.skip("needs all ranks on one node")
    made = RowLog(group, group.size - 1, SIZE)
    yield made
    made.free()


def append(log, first, last):
    """Have the root append numbers; entry n is 10 * n."""
    at(-1, lambda: log.append(10 * np.arange(first, last)))
    meet()


def found(log, begin, end):
    entries = log.between(begin, end)
    # The next numbers are not appended before all ranks have read.
    meet()
    return entries if entries is None else entries.tolist()


def test_entries_are_read_until_they_are_overwritten(log):
    assert found(log, 0, 0) == []
    append(log, 0, 5)
    assert found(log, 0, 5) == [0, 10, 20, 30, 40]
    assert found(log, 3, 4) == [30]
    append(log, 5, 10)
    assert found(log, 2, 10) == [20, 30, 40, 50, 60, 70, 80, 90]
    assert found(log, 2, 5) == [20, 30, 40]
    for begin, end in ((1, 10), (0, 10), (1, 5), (0, 0)):
        assert found(log, begin, end) is None


def test_entries_that_are_not_complete_are_left_out(log):
    append(log, 0, 3)
    assert found(log, 1, 7) == [10, 20]


def test_entries_are_invalid_as_soon_as_they_may_be_overwritten(log):
    append(log, 0, 3)
    at(-1, lambda: log._words.write(0, SIZE + 2))
    assert found(log, 1, 3) is None
    assert found(log, 2, 3) == [20]


def test_more_entries_than_the_log_has(log):
    append(log, 0, SIZE + 1)
    assert found(log, 0, SIZE + 1) is None
    assert found(log, SIZE - 1, SIZE + 1) == [70, 80]
    append(log, SIZE + 1, SIZE + 3)
    assert found(log, SIZE - 1, SIZE + 3) == [70, 80, 90, 100]


def test_an_append_may_be_repeated(log, rank, size):
    append(log, 0, 2)
    if rank == size - 1:
        log._words.write(0, 4)
        log._ring[2] = 99
        log._words.write(1, 4)
    append(log, 2, 4)
    assert found(log, 0, 4) == [0, 10, 20, 30]
    assert rank < size - 1 or log.end == 4


@pytest.mark.parametrize("chunk", [1, 7, 1 << 16])
def test_rows_are_copied_in_pieces(monkeypatch, chunk):
    monkeypatch.setattr("hpcaccum.server.parameter_copies._CHUNK", chunk)
    source, rows = np.arange(60.0).reshape(10, 2, 3), np.array([0, 2, 3, 8])
    for target in (np.zeros((10, 2, 3)), np.zeros((10, 3, 2), "f4").swapaxes(1, 2)):
        expected = np.zeros((10, 2, 3))
        expected[rows] = source[rows]
        copy_rows(source, target, rows)
        assert (target == expected).all()
    copy_rows(source[:, :0], target[:, :0], rows)
