"""The words of the admission protocol: packing, limits, assignment; receipts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcaccum.accumulator import Receipt
from hpcaccum.accumulator.state import Packing, Record, State

states = st.builds(
    State,
    step=st.integers(-(2**32), 2**32 - 1),
    shape=st.integers(0, 2**10 - 1),
    parity=st.integers(0, 1),
    waiting=st.integers(0, 1),
    number=st.integers(0, 2**18 - 1),
)


@given(states)
def test_state_is_packed_into_one_word(state):
    shaped, plain = Packing(shaped=True), Packing(shaped=False)

    assert shaped.unpack(shaped.pack(state)) == state
    assert plain.unpack(plain.pack(state._replace(shape=0))) == state._replace(shape=0)
    assert -(2**63) <= shaped.pack(state) < 2**63


@pytest.mark.parametrize("shaped", [False, True])
def test_limits_fill_the_word(shaped):
    packing = Packing(shaped=shaped)
    shape, count = packing.max_shapes, packing.max_count
    largest = State(packing.max_step, shape, 1, 1, count)
    lowest = State(-packing.max_step - 1, 0, 0, 0, 0)

    assert packing.pack(largest) == 2**63 - 1
    assert packing.pack(lowest) == -(2**63)
    assert packing.unpack(packing.pack(largest)) == largest
    assert packing.pack(State(0, 0, 0, 0, 0)) == 0


@given(
    st.builds(
        Record,
        st.integers(0, 1),
        st.integers(0, 2**20 - 1),
        st.integers(0, 1),
        st.integers(0, 2**10 - 1),
        st.integers(0, 1),
        st.integers(0, 1),
        st.floats(0, exclude_min=True, allow_infinity=False),
    )
)
def test_record_is_two_words_the_first_never_nothing(record):
    word = record.word()

    assert Record.of(word, record.weight) == record
    assert word < 2**63
    if record.number or record.adding:
        assert word != 0


def test_a_receipt_is_printed_in_a_line():
    receipts = [
        Receipt(True, 7, 7, loss=0.5),
        Receipt(False, 4, 7),
        Receipt(False, 7, 7, nonfinite=True),
        Receipt(True, 3, 3, sent=False),
        Receipt(True, 0, 2),
    ]
    assert list(map(str, receipts)) == [
        "accepted, lag 0, step 7",
        "not accepted: stale, lag 3, step 7",
        "not accepted: nonfinite, lag 0, step 7",
        "accepted, not sent, lag 0, step 3",
        "accepted, lag 2, step 2",
    ]
    assert [bool(each) for each in receipts] == [True, False, False, True, True]
    assert [each.lag for each in receipts] == [0, 3, 0, 0, 2]
    assert [each.reason for each in receipts] == ["", "stale", "nonfinite", "", ""]
