"""Updates of one variable, in pieces that stay in the cache during several passes.

Half precision is computed in float32, in buffers of a piece.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hpcaccum.dtypes import Array
    from hpcaccum.row_sums import Rows

    # Called with pieces of the value, of the gradient and of the slots, with working
    # memory of the same size, and with numbers. The arrays are vectors of one dtype.
    Update = Callable[..., None]

# Elements: small enough for the cache, large enough that calling NumPy costs little.
# Measured with 1 MiB of L2: best of 2**13 to 2**16, all rules, 1 to 64 MiB.
PIECE = 1 << 16


class Scratch(threading.local):
    """Working memory of a piece, for each thread and dtype."""

    def __init__(self) -> None:
        self._pieces: dict[np.dtype[Any], Array] = {}

    def piece(self, dtype: np.dtype[Any]) -> Array:
        """Return the vector of a dtype."""
        if dtype not in self._pieces:
            self._pieces[dtype] = np.empty(PIECE, dtype)
        return self._pieces[dtype]


def update_array(
    arrays: Sequence[Array],
    scratch: Array,
    update: Update,
    numbers: Sequence[float],
) -> None:
    """Update the value and the slots of a variable of any strides and order."""
    access: Any = [["readwrite", "overlap_assume_elementwise"] for _ in arrays]
    access[1][0] = "readonly"
    # Views where that is possible, otherwise buffers, which are written back.
    with np.nditer(
        arrays,
        ["external_loop", "buffered", "copy_if_overlap"],
        access,
        [scratch.dtype] * len(access),
        casting="same_kind",
        buffersize=PIECE,
    ) as pieces:
        for piece, *others in pieces:
            update(piece, *others, scratch[: piece.size], *numbers)


def update_rows(
    rows: Rows,
    arrays: Sequence[Array],
    scratch: Array,
    update: Update,
    numbers: Sequence[float],
) -> None:
    """Update some rows of the value and of the slots of a variable.

    Pieces have several rows, or one row if that is longer than ``scratch``.
    """
    width, dtype = rows.values.shape[1], scratch.dtype
    if width > scratch.size:
        scratch = np.empty(width, dtype)
    step = scratch.size // max(1, width)
    for start in range(0, rows.indices.size, step):
        places = rows.indices[start : start + step]
        grad = rows.values[start : start + step].reshape(-1)
        pieces = [array[places].astype(dtype, copy=False) for array in arrays]
        value, *slots = [piece.reshape(-1) for piece in pieces]
        update(value, grad, *slots, scratch[: grad.size], *numbers)
        for array, piece in zip(arrays, [value, *slots], strict=True):
            array[places] = piece.reshape(len(places), *array.shape[1:])
