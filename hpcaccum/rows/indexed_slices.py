"""IndexedSlices: a gradient of some rows of a variable, such as an embedding's."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from typing import Any, SupportsIndex

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from hpcaccum.device import check_array, is_device, to_host
from hpcaccum.dtypes import FLOATS, Array, check_unmasked
from hpcaccum.errors import InvalidArgumentError
from hpcaccum.rows.sums import Rows, add_at, distinct

# In `IndexedSlices.dense_shape`, for a number of rows.
UNKNOWN = -1

_INTEGERS = (np.dtype(np.int64), np.dtype(np.int32))


class IndexedSlices:
    """A gradient of some rows of a variable; its other rows are zero.

    ``values[i]`` belongs to the row ``indices[i]``. Indices may be in any order. The
    gradient of a row that is given several times is the sum.

    Args:
        values: Array of real numbers with a row for each index. It is not copied. A
            device array (CuPy's) must be contiguous, of floats, and on the current
            device.
        indices: Vector of integers; the fraction of a float is dropped. If ``values``
            is on a device, it may be there, too, and must have integers.
        dense_shape: Shape of the variable; None if it is unknown. Its first number is
            -1 if the number of rows is unknown.

    Attributes:
        values: As given, as an array.
        indices: As a vector of int64.
        dense_shape: As a tuple, or None.

    Raises:
        InvalidArgumentError: If ``indices`` is not a vector of numbers within 64 bits,
            ``values`` does not have a row of real numbers for each, one of them is
            masked, or only ``indices`` is on a device.
        TypeError: If ``dense_shape`` does not consist of integers.

    Source: TensorFlow's ``tf.IndexedSlices``.
    """

    __slots__ = ("dense_shape", "indices", "values")

    def __init__(
        self,
        values: ArrayLike,
        indices: ArrayLike,
        dense_shape: Iterable[SupportsIndex] | None = None,
    ) -> None:
        if is_device(indices) and not is_device(values):
            raise InvalidArgumentError(
                "indices are on the device, values in CPU memory; copy one of them "
                "with cupy.asnumpy or cupy.asarray"
            )
        self.indices = _vector(indices)
        self.values = _array("values", values)
        if self.values.ndim == 0:
            raise InvalidArgumentError(
                "values must have a row for each index, got a number"
            )
        if len(self.values) != self.indices.size:
            raise InvalidArgumentError(
                f"values must have {self.indices.size} rows, one for each index, got "
                f"{len(self.values)}"
            )
        self.dense_shape: tuple[int, ...] | None = None
        if dense_shape is not None:
            try:
                self.dense_shape = tuple(operator.index(dim) for dim in dense_shape)
            except TypeError:
                raise TypeError(
                    f"dense_shape must be a list or a tuple of integers, got "
                    f"{dense_shape!r}"
                ) from None

    @property
    def on_device(self) -> bool:
        """Whether the values are on a device."""
        return is_device(self.values)

    def __repr__(self) -> str:
        """Show the shapes, not the elements."""
        shape = "" if self.dense_shape is None else f" of {self.dense_shape}"
        return (
            f"<IndexedSlices: {self.indices.size} rows{shape}, {self.values.dtype} "
            f"{self.values.shape}>"
        )

    def to_dense(self, dtype: DTypeLike | None = None) -> Array:
        """Return the gradient of the whole variable, a new array of `dense_shape`.

        Args:
            dtype: Of the array, in which repeated rows are added; by default that of
                the values.

        Raises:
            InvalidArgumentError: If `dense_shape` is None or does not fit, or the
                values are on a device.
        """
        shape = self.dense_shape
        if self.on_device:
            raise InvalidArgumentError(
                "IndexedSlices on a device cannot be converted to an array; "
                "DeviceRowAccumulator sums rows on a device"
            )
        if shape is None or UNKNOWN in shape[:1]:
            lack = "dense_shape" if shape is None else "a number of rows"
            raise InvalidArgumentError(
                f"IndexedSlices cannot be converted to an array without {lack}"
            )
        if not shape or shape[1:] != self.values.shape[1:]:
            raise InvalidArgumentError(
                f"values of shape {self.values.shape} are not rows of an array of "
                f"shape {shape}"
            )
        check_indices(self.indices, shape[0])
        dense = np.zeros(shape, self.values.dtype if dtype is None else dtype)
        add_at(matrix(dense), self.indices, matrix(self.values))
        return dense


def check_indices(indices: Array, rows: int) -> None:
    """Raise InvalidArgumentError unless all indices are in 0 to ``rows - 1``."""
    wrong = indices[(indices < 0) | (indices >= rows)]
    if wrong.size:
        raise InvalidArgumentError(
            f"indices must be in 0 to {rows - 1}, got {wrong[0]} "
            f"({wrong.size} of {indices.size} are not)"
        )


def rows_of(grad: IndexedSlices, dtype: np.dtype[Any]) -> Rows:
    """Return the rows of a gradient in CPU memory; repeated ones are added."""
    return distinct(to_host(grad.indices), matrix(to_host(grad.values)), dtype)


def sliced(rows: Rows, shape: tuple[int, ...]) -> IndexedSlices:
    """Return rows as a gradient of a variable of some shape."""
    values = rows.values.reshape(rows.indices.size, *shape[1:])
    return IndexedSlices(values, rows.indices, shape)


def matrix(values: Array) -> Array:
    """Return values as a matrix whose rows are vectors."""
    return values.reshape(len(values), math.prod(values.shape[1:]))


def _vector(indices: Any) -> Array:
    array = _array("indices", indices)
    if array.ndim != 1:
        raise InvalidArgumentError(
            f"indices must be a vector, got an array of shape {array.shape}"
        )
    if is_device(array):
        return array.astype(np.int64, copy=False)
    with np.errstate(all="ignore"):
        vector = array.astype(np.int64, copy=False)
        exact = array.dtype.kind in "bi" or bool((vector == np.trunc(array)).all())
    if not exact:
        raise InvalidArgumentError("indices must be integers of 64 bits")
    return vector


def _array(what: str, given: Any) -> Array:
    if is_device(given):
        check_array(what, given, _INTEGERS if what == "indices" else FLOATS)
        return given  # type: ignore[no-any-return]
    check_unmasked(what, given)
    try:
        array = np.asarray(given)
    except ValueError as error:
        raise InvalidArgumentError(f"{what} are not an array: {error}") from None
    if array.dtype.kind not in "biuf" and array.dtype not in FLOATS:
        raise InvalidArgumentError(
            f"{what} must be an array of real numbers, got dtype {array.dtype}"
        )
    return array
