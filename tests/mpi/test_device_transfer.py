"""Transfer: what it promises to those who do not wait."""

from __future__ import annotations

import numpy as np

from hpcaccum import Layout
from hpcaccum.device.transfer import Transfer

LAYOUT = Layout({"x": (300,), "y": (3, 5)}, "float32")


def filled(cp, number):
    shapes = LAYOUT.shapes.items()
    return {name: cp.full(shape, number, np.float32) for name, shape in shapes}


def test_pieces_come_in_the_order_in_which_they_are_wanted(cp):
    transfer, host = (
        Transfer(LAYOUT, *[np.dtype("f4")] * 2),
        np.zeros(LAYOUT.size, "f4"),
    )
    transfer.pin(host)
    pieces = [slice(100, LAYOUT.size), slice(0, 100)]
    arrays = filled(cp, 3.0)
    events = transfer.send(arrays, host, pieces)
    for array in arrays.values():
        array.fill(-7)
    for event, piece in zip(events, pieces, strict=True):
        event.synchronize()
        views = LAYOUT.views(host)
        assert (host[piece][: 300 - piece.start] == 3).all()
    assert all((view == 3).all() for view in views.values())
    transfer.free()


def test_memory_is_given_back_when_nothing_reads_or_writes_it(cp, pinned):
    for way in ("out", "back"):
        transfer = Transfer(LAYOUT, *[np.dtype("f4")] * 2)
        host = np.full(LAYOUT.size, 2, "f4")
        transfer.pin(host)
        assert len(pinned) == 1
        arrays = filled(cp, 3.0)
        if way == "out":
            transfer.send(arrays, host)
        else:
            transfer.fetch(host)
            transfer.deliver(arrays)
        transfer.free()
        assert not pinned
        number = 3 if way == "out" else 2
        assert (LAYOUT.views(host)["x"] == number).all()
        assert all((array.get() == number).all() for array in arrays.values())


def test_pinning_twice_is_pinning_once(cp, pinned):
    transfer, host = (
        Transfer(LAYOUT, *[np.dtype("f4")] * 2),
        np.zeros(LAYOUT.size, "f4"),
    )
    for _ in range(2):
        transfer.pin(host)
    assert len(pinned) == 1
    transfer.free()
