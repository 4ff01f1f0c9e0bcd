"""Named arrays, one after the other in a flat buffer."""

from __future__ import annotations

import bisect
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from hpcaccum.dtypes import accumulation_dtype, float_dtype
from hpcaccum.errors import InvalidArgumentError

# Bytes of a cache line, on which every array begins: ranks that write to neighboring
# arrays share no line, and vector loads are aligned.
ALIGNMENT = 64


class Layout:
    """The places of named arrays in one flat buffer.

    Args:
        shapes: Name to shape, in the order of the buffer.
        dtype: The dtype of the buffer, and so of all arrays.

    Attributes:
        dtype: The dtype.
        shapes: Name to shape.
        offsets: Name to first element in the buffer.
        size: Number of elements of the buffer, with padding.
        nbytes: Number of bytes of the buffer.

    Raises:
        TypeError: If ``shapes`` is not a mapping, or a shape does not consist of
            integers.
        InvalidArgumentError: If a dimension is negative, or the dtype is not
            floating-point.
    """

    def __init__(self, shapes: Mapping[str, Sequence[int]], dtype: DTypeLike) -> None:
        self.dtype = float_dtype(dtype)
        if not isinstance(shapes, Mapping):
            kind = type(shapes).__name__
            raise TypeError(f"shapes must map names to shapes, got {kind}")
        self.shapes = {name: _shape(name, shape) for name, shape in shapes.items()}
        self.offsets: dict[str, int] = {}
        step = ALIGNMENT // self.dtype.itemsize
        self.size = 0
        # For `views`, which a step calls several times.
        self._places: dict[str, slice] = {}
        for name, shape in self.shapes.items():
            self.offsets[name] = self.size
            count = math.prod(shape)
            self._places[name] = slice(self.size, self.size + count)
            self.size += -(-count // step) * step
        self.nbytes = self.size * self.dtype.itemsize
        self._starts = list(self.offsets.values())

    @classmethod
    def of(cls, arrays: Mapping[str, np.ndarray[Any, Any]]) -> Layout:
        """Return the layout of sums of arrays, in a dtype that holds each of them."""
        dtypes = [accumulation_dtype(array.dtype) for array in arrays.values()]
        shapes = {name: array.shape for name, array in arrays.items()}
        return cls(shapes, np.result_type(*dtypes) if dtypes else np.float32)

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names, in the order of the buffer."""
        return iter(self.shapes)

    def __len__(self) -> int:
        """Return the number of arrays."""
        return len(self.shapes)

    def __repr__(self) -> str:
        """Show the numbers."""
        return f"Layout({len(self)} arrays, {self.size} x {self.dtype})"

    @property
    def fingerprint(self) -> str:
        """A hash of names, shapes, order and dtype, for comparison between ranks."""
        # Imported here, as it is slow.
        import hashlib

        text = repr((list(self.shapes.items()), str(self.dtype)))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def views(self, buffer: np.ndarray[Any, Any]) -> dict[str, np.ndarray[Any, Any]]:
        """Return each array as a view of ``buffer``, a vector of `size` elements."""
        shapes = self.shapes
        return {n: buffer[at].reshape(shapes[n]) for n, at in self._places.items()}

    def place(self, name: str) -> slice:
        """Return the place of an array in the buffer."""
        return self._places[name]

    def overlaps(self, piece: slice) -> list[tuple[str, slice, slice]]:
        """Return the arrays that overlap a piece of the buffer.

        For each its name, the elements (of the array as a vector) that are in the
        piece, and their place in the piece.
        """
        found = []
        names = list(self.shapes)
        first = max(0, bisect.bisect_right(self._starts, piece.start) - 1)
        for name in names[first : bisect.bisect_left(self._starts, piece.stop)]:
            array = self._places[name]
            begin, end = max(array.start, piece.start), min(array.stop, piece.stop)
            if begin < end:
                elements = slice(begin - array.start, end - array.start)
                place = slice(begin - piece.start, end - piece.start)
                found.append((name, elements, place))
        return found


def _shape(name: str, shape: Sequence[int]) -> tuple[int, ...]:
    try:
        dims = tuple(map(operator.index, shape))
    except TypeError:
        raise TypeError(
            f"shape of {name!r} must be a list or a tuple of integers, got {shape!r}"
        ) from None
    if min(dims, default=0) < 0:
        raise InvalidArgumentError(
            f"shape of {name!r} must have no negative dimension, got {dims}"
        )
    return dims
