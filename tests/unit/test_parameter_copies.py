"""An agent copies a message in short steps, as admissions wait meanwhile."""

from __future__ import annotations

import pickle
from types import SimpleNamespace

import numpy as np
import pytest

from hpcaccum.server.parameter_copies import NOTHING, Message, RowMessage

MIB = 1 << 20


def test_a_message_is_copied_in_short_steps():
    flat = np.arange(3 * MIB // 8 + 5.0)
    message = Message(NOTHING)
    steps = message.reading(flat)

    next(steps)

    message.data[MIB:] = 0
    assert sum(1 for _ in steps) == 3
    assert np.array_equal(message.data, flat.view(np.uint8))


@pytest.mark.parametrize(("rows", "number"), [(None, 4), (np.arange(0, 2000, 2), 2)])
def test_rows_are_copied_in_short_steps(rows, number):
    table = np.arange(2000 * 200.0).reshape(2000, 200)
    found = None if rows is None else rows + 1
    copier = SimpleNamespace(
        names=["table", "bias"],
        end=lambda _: 7,
        changes=lambda *_: found,
        views=lambda _: {"table": table, "bias": np.array(3.0)},
        rows_of=lambda name, _: rows if name == "table" else None,
    )
    message = RowMessage(copier, NOTHING)

    # One step more is for the scalar.
    assert sum(1 for _ in message.reading(np.empty(0))) == number + 1
    message.complete(5)
    (places, values), (_, bias) = pickle.loads(message.data)
    assert np.array_equal(places, rows) if number == 2 else places is None
    assert np.array_equal(values, table if rows is None else table[rows])
    assert bias == 3
    assert (message.place, message.version) == (7, 5)
