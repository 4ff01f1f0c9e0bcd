"""What a Reducer accepts on a device, and what it refuses on all ranks."""

from __future__ import annotations

import numpy as np
import pytest

from hpcaccum import InvalidArgumentError

from .on_device import FEW_RANKS, empty_like, to_device
from .reducing import (
    EACH,
    drawn,
    maker_fixture,  # noqa: F401
    works,
)

pytestmark = [FEW_RANKS, pytest.mark.any_size]


def bad_arrays(cp):
    good = {"x": cp.ones((900,), np.float32), "y": cp.ones((300,), np.float32)}
    return [
        ({**good, "y": np.ones(300, np.float32)}, "some on the host"),
        ({**good, "x": cp.ones(1800, np.float32)[::2]}, "contiguous"),
        ({**good, "x": cp.ones(900, np.int32)}, "got int32"),
        ({**good, "x": cp.ones(900, np.complex64)}, "got complex64"),
        ({**good, "x": cp.ones(901, np.float32)}, r"\(900,\), got \(901,\)"),
        ({**good, "z": good["x"]}, "no array is named 'z'"),
    ]


@EACH
@pytest.mark.parametrize("where", ["inputs", "out"])
def test_bad_arrays_are_an_error_everywhere(cp, maker, rank, size, where):
    reducer = maker({"x": (900,), "y": (300,)})
    good = empty_like(cp, {"x": (900,), "y": (300,)}, np.float32)
    for bad, message in bad_arrays(cp):
        mine, out = (bad, good) if where == "inputs" else (good, bad)
        if rank != size - 1:
            mine, out = good, None
        with pytest.raises(InvalidArgumentError, match=message):
            reducer.reduce(mine, out=out)

        assert all((array.get() == -7).all() for array in good.values())
        works(reducer, size)


@EACH
@pytest.mark.parametrize("where", ["inputs", "out"])
def test_bad_arrays_are_found_where_good_ones_lay(cp, maker, rank, size, where):
    shapes = {"x": (30, 30), "y": (30, 30)}
    reducer, parts = maker(shapes), [drawn(shapes, r, 0) for r in range(size)]
    mine, out = to_device(cp, parts[rank]), empty_like(cp, shapes, np.float32)
    given = mine if where == "inputs" else out
    one = given["x"]

    def check(found):
        for name, array in found.items():
            wanted = maker.expected([part[name] for part in parts], np.float32)
            maker.check(array.get(), wanted)

    for bad, message in [
        (one.T, "contiguous"),
        (one.reshape(900), r"\(900,\)"),
        (one.view(np.int32), "got int32"),
        (one.get(), "some on the host"),
        (None, "None|must be a writable array"),
    ]:
        for _ in range(3):
            check(reducer.reduce(mine, out=out))
        wrong = {where: {**given, "x": bad}}
        with pytest.raises(InvalidArgumentError, match=message):
            reducer.reduce(wrong.get("inputs", mine), out=wrong.get("out", out))
    with pytest.raises(InvalidArgumentError, match="share memory"):
        reducer.reduce(mine, out={**out, "x": out["y"]})
    with pytest.raises(InvalidArgumentError, match="not an array of this call"):
        reducer.reduce({"x": mine["x"]}, out=out)
    reducer.start("x", mine["x"])
    with pytest.raises(InvalidArgumentError, match="already been started"):
        reducer.reduce(mine, out=out)
    check(reducer.reduce(mine, out=out))


@EACH
def test_the_same_array_under_other_names(cp, maker):
    reducer = maker({"x": (900,), "y": (900,)})
    array, out = cp.ones(900, np.float32), cp.zeros(900, np.float32)
    for name in "xyxy":
        for _ in range(2):
            out.fill(0)
            assert list(reducer.reduce({name: array})) == [name]
            reducer.reduce({name: array}, out={name: out})
            assert (out.get() == 1).all()
    with pytest.raises(InvalidArgumentError, match="no array is named 'z'"):
        reducer.reduce({"z": array})
