"""How the variables of a center are divided among servers."""

from __future__ import annotations

import numpy as np
import pytest

from hpcaccum.server.part import Part, cut, joined
from hpcaccum.server.wire_format import WireFormat

SHAPES = {"matrix": (37, 5), "scalar": (), "vector": (600,), "empty": (0,)}


def wire(dtypes=(np.float32,)):
    return WireFormat.of(
        {
            name: np.zeros(shape, dtypes[n % len(dtypes)])
            for n, (name, shape) in enumerate(SHAPES.items())
        }
    )


def parts_of(form, count, elementwise):
    return [
        Part(form, part, elementwise=elementwise)
        for part in cut(form.parameters, count, elementwise=elementwise)
    ]


@pytest.mark.parametrize("elementwise", [True, False])
@pytest.mark.parametrize("count", [1, 2, 3, 7, 200])
def test_pieces_of_all_servers_are_the_variables(count, elementwise):
    form = wire((np.float16, np.float64))
    flat = np.arange(form.parameters.size, dtype=form.parameters.dtype)
    found = [
        {
            name: view.astype(each.wire.dtypes[name])
            for name, view in each.wire.parameters.views(flat[each.part]).items()
        }
        for each in parts_of(form, count, elementwise)
    ]

    for name, view in form.parameters.views(flat).items():
        whole = joined([arrays.get(name) for arrays in found], SHAPES[name])
        if whole is None:
            # No server has a variable without elements, unless all have all variables.
            assert view.size == 0
            assert not elementwise
            continue
        assert whole.dtype == form.dtypes[name]
        np.testing.assert_array_equal(whole, view.astype(whole.dtype))
        holders = [name in arrays for arrays in found]
        assert all(holders) if elementwise else holders.count(True) == 1
