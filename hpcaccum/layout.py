"""Named arrays laid out one after the other in a flat buffer."""

from __future__ import annotations

import bisect
import hashlib
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcaccum.dtypes import accumulation_dtype, float_dtype

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

# Every array begins on a cache line: two ranks that work on neighbours do not
# fight for one, and vector loads are aligned.
ALIGNMENT = 64


class Layout:
    """Where each of several named arrays lies in one flat buffer.

    Args:
        shapes: Name to shape, in the order of the buffer.
        dtype: The one dtype of the buffer.

    Attributes:
        size: Elements of the buffer, padding included.
        nbytes: Bytes of the buffer.
    """

    def __init__(self, shapes: Mapping[str, Sequence[int]], dtype: Any) -> None:
        self.dtype = float_dtype(dtype)
        self.shapes = {name: tuple(shape) for name, shape in shapes.items()}
        self.offsets: dict[str, int] = {}
        step = ALIGNMENT // self.dtype.itemsize
        self.size = 0
        for name, shape in self.shapes.items():
            self.offsets[name] = self.size
            self.size += -(-math.prod(shape) // step) * step
        self.nbytes = self.size * self.dtype.itemsize
        self._starts = list(self.offsets.values())

    @classmethod
    def of(cls, arrays: Mapping[str, np.ndarray[Any, Any]]) -> Layout:
        """Lay out arrays like these, in the dtype that holds all of theirs."""
        dtypes = [accumulation_dtype(array.dtype) for array in arrays.values()]
        shapes = {name: array.shape for name, array in arrays.items()}
        return cls(shapes, np.result_type(*dtypes) if dtypes else np.float32)

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names, in the order of the buffer."""
        return iter(self.shapes)

    def __len__(self) -> int:
        """Return how many arrays there are."""
        return len(self.shapes)

    def __repr__(self) -> str:
        """Show the numbers."""
        return f"Layout({len(self)} arrays, {self.size} x {self.dtype})"

    @property
    def fingerprint(self) -> str:
        """A hash of names, shapes, order and dtype: the same on ranks that agree."""
        text = repr((list(self.shapes.items()), str(self.dtype)))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def views(self, buffer: np.ndarray[Any, Any]) -> dict[str, np.ndarray[Any, Any]]:
        """Return each array as a view of ``buffer``, a vector of `size` elements."""
        return {
            name: buffer[start : start + math.prod(shape)].reshape(shape)
            for (name, shape), start in zip(
                self.shapes.items(), self.offsets.values(), strict=True
            )
        }

    def place(self, name: str) -> slice:
        """Return where an array lies in the buffer."""
        start = self.offsets[name]
        return slice(start, start + math.prod(self.shapes[name]))

    def overlaps(self, piece: slice) -> list[tuple[str, slice, slice]]:
        """Return what lies in a piece of the buffer.

        Returns:
            Names, the elements of each array (as a vector) that lie in the piece, and
            where in the piece they lie.
        """
        found = []
        names = list(self.shapes)
        first = max(0, bisect.bisect_right(self._starts, piece.start) - 1)
        for name in names[first : bisect.bisect_left(self._starts, piece.stop)]:
            offset = self.offsets[name]
            begin = max(offset, piece.start)
            end = min(offset + math.prod(self.shapes[name]), piece.stop)
            if begin < end:
                elements = slice(begin - offset, end - offset)
                place = slice(begin - piece.start, end - piece.start)
                found.append((name, elements, place))
        return found
