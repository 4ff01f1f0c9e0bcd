"""Shapes of gradients, their numbers, and the counters of receipts."""

from __future__ import annotations

import numpy as np
import pytest

import hpcaccum as hpc
from hpcaccum.accumulator.receipts import MAX_LAG, Counters, Receipt
from hpcaccum.accumulator.shapes import (
    ShapeTable,
    compatible,
    declared_shape,
    is_fixed,
    size_of,
)
from hpcaccum.mpi import AtomicWords
from hpcaccum.mpi.group import Group

from .acting import at, everywhere, meet


@pytest.fixture
def words(comm):
    made = AtomicWords(
        Group.of(comm), 0, 2 + ShapeTable.words(4) + Counters.words(comm.size)
    )
    yield made
    meet()
    made.free()


@pytest.mark.parametrize(
    ("shape", "declared"),
    [
        (None, None),
        (3, (3,)),
        (np.int64(3), (3,)),
        ((), ()),
        ([2, None], (2, None)),
        ((np.int8(2), 0), (2, 0)),
    ],
)
def test_shapes_that_can_be_declared(shape, declared):
    assert declared_shape(shape) == declared


@pytest.mark.parametrize("shape", ["3", 2.0, {3}, True, (1.5,), ("2",), np.ones(2)])
def test_shapes_of_another_type(shape):
    with pytest.raises(TypeError):
        declared_shape(shape)


@pytest.mark.parametrize("shape", [-1, (2, -3), (1,) * 17])
def test_shapes_that_cannot_be(shape):
    with pytest.raises(hpc.InvalidArgumentError, match="shape"):
        declared_shape(shape)


@pytest.mark.parametrize(
    ("shape", "declared", "fits"),
    [
        ((2, 3), None, True),
        ((2, 3), (2, 3), True),
        ((2, 3), (2, None), True),
        ((2, 3), (None, None), True),
        ((2, 3), (3, None), False),
        ((2, 3), (None,), False),
        ((2,), (2, None), False),
        ((), (), True),
        ((), (1,), False),
        ((1,), (), False),
        ((0,), (None,), True),
    ],
)
def test_shape_fits_what_was_declared(shape, declared, fits):
    assert compatible(shape, declared) == fits
    assert is_fixed(declared) == (declared is not None and None not in declared)


def test_size_is_the_product():
    assert [size_of(s) for s in [(), (3,), (2, 3), (4, 0)]] == [1, 3, 6, 0]


def test_number_of_a_shape_is_understood_by_all(words, rank):
    table = ShapeTable(words, 1, 4)
    shapes = [(), (2, 3), (1,) * 16, (0, 2**40)]
    numbers = [at(k, table.number, shape) for k, shape in enumerate(shapes)]

    assert numbers == [1, 2, 3, 4]
    assert [table.shape(number) for number in numbers] == shapes
    # Known since it was read.
    assert all(found == 2 for found in everywhere(table.number, (2, 3)))
    assert table.number((5,)) is None
    assert words.read(0) == words.read(1 + ShapeTable.words(4)) == 0
    meet()


def test_one_shape_has_one_number_whichever_rank_asks(words, size):
    table = ShapeTable(words, 1, 4)
    shapes = [(2, 3), (), (0,), (3, 2)]
    numbers = [at(k, table.number, shapes[k // 4]) for k in range(16)]

    assert numbers == [1] * 4 + [2] * 4 + [3] * 4 + [4] * 4
    assert everywhere(table.number, (2, 3)) == [1] * size


def test_an_entry_that_is_not_filled_is_passed_over(words):
    table = ShapeTable(words, 1, 4)
    # Another rank has reserved the first entry and is writing it.
    at(0, words.fetch_add, 1, 1)
    at(1, words.write_range, table._entry(1) + 1, [2, 3])
    assert at(0, table.number, (2,)) == 2
    assert at(1, table.number, (2, 3)) == 3
    at(0, words.write, table._entry(1), 3)
    assert at(0, table.shape, 1) == at(1, table.shape, 1) == (2, 3)
    assert at(0, table.number, (2,)) == 2


def test_two_numbers_of_one_shape_are_one_shape(words, monkeypatch):
    # Two ranks search for it at the same time, and neither sees the other's entry.
    table = ShapeTable(words, 1, 4)
    monkeypatch.setattr(table, "_read_new", lambda: None)
    at(0, table._add, (2, 3))
    at(1, table._add, (2, 3))

    assert [table.shape(number) for number in (1, 2)] == [(2, 3), (2, 3)]


def test_receipt_is_true_if_accepted():
    accepted, dropped = Receipt(True, 7, 5), Receipt(False, 2, 5)

    assert accepted
    assert not dropped
    assert (accepted.lag, dropped.lag) == (-2, 3)
    assert hpc.Receipt is Receipt
    with pytest.raises(AttributeError):
        accepted.accepted = False
    assert (accepted.reason, dropped.reason) == ("", "stale")
    assert repr(dropped) == (
        "Receipt(accepted=False, local_step=2, global_step=5, sent=True, "
        "nonfinite=False, loss=None)"
    )


def test_counters_count_receipts_of_all_ranks(words, rank, size):
    counters = Counters(words, 1, rank, size)
    lags = [-4, 0, 1, MAX_LAG, MAX_LAG + 1, 10**12][: 4 + rank]
    for lag in lags:
        counters.post(counters.next(Receipt(lag <= 0, 100 - lag, 100)))
        words.flush()
    meet()

    tally = counters.tally()
    dropped = (2, 3, 4, 4)[:size]
    assert tally.accepted == (2,) * size
    assert tally.dropped == dropped
    assert tally.lags == {0: 2 * size, 1: size, MAX_LAG: sum(dropped) - size}
    assert words.read(0) == 0
    meet()
