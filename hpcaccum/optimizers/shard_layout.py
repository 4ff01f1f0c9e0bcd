"""What the ranks of a shard group reduce: layouts, and memory for results."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcaccum.device import cupy, is_device
from hpcaccum.dtypes import accumulation_dtype, float_dtype
from hpcaccum.layout import Layout
from hpcaccum.rows import RowFormat, digits

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from hpcaccum.dtypes import Array
    from hpcaccum.optimizers.variable import Variable


def layout_of(variables: Iterable[Variable], ranks: int) -> Layout:
    """Return the layout of what is reduced of gradients by so many ranks.

    Of rows of a sparse variable these are their numbers; see `RowExchange`.
    """
    rows = row_formats(variables)
    marks = {n: np.zeros((ranks, digits(each)), np.float32) for n, each in rows.items()}
    return Layout.of({v.name: marks.get(v.name, v.value) for v in variables})


def row_formats(variables: Iterable[Variable]) -> dict[str, RowFormat]:
    """Return the formats of the gradients of sparse variables, by name."""
    return {
        var.name: RowFormat(
            len(var.value), prod(var.shape[1:]), accumulation_dtype(var.dtype)
        )
        for var in variables
        if var.sparse
    }


def device_sums(variables: Sequence[Variable]) -> dict[str, Array]:
    """Return memory for the results of variables on a device; nothing for others."""
    values = {var.name: var.value for var in variables}
    if not is_device(variables[0].value):
        return {}
    layout = Layout.of(values)
    return layout.views(cupy().zeros(layout.size, layout.dtype))


def check_wire_dtype(wire_dtype: Any) -> str | None:
    """Return the name of a dtype in which gradients may travel; None for their own."""
    return None if wire_dtype is None else str(float_dtype(wire_dtype, "wire_dtype"))
