"""The declared shape of an accumulator, of which dimensions may be unknown."""

from __future__ import annotations

import math
import numbers
import operator
from typing import TYPE_CHECKING, Any

from hpcaccum.errors import InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Sequence

Shape = tuple[int, ...]
PartialShape = tuple["int | None", ...]

MAX_DIMS = 16


def declared_shape(shape: Any) -> PartialShape | None:
    """Return a declared shape as a tuple; None entries and None itself are unknown."""
    if shape is None:
        return None
    if isinstance(shape, numbers.Integral) and not isinstance(shape, bool):
        shape = (shape,)
    if not isinstance(shape, (list, tuple)):
        raise TypeError(f"shape must be a list, a tuple or None, got {shape!r}")
    try:
        dims = tuple(None if dim is None else operator.index(dim) for dim in shape)
    except TypeError:
        text = f"shape must have only integers and None, got {shape!r}"
        raise TypeError(text) from None
    if any(dim is not None and dim < 0 for dim in dims):
        raise InvalidArgumentError(f"shape must have no negative dimension, got {dims}")
    if len(dims) > MAX_DIMS:
        raise InvalidArgumentError(
            f"shape must have at most {MAX_DIMS} dimensions, got {len(dims)}"
        )
    return dims


def is_fixed(declared: PartialShape | None) -> bool:
    """Return whether every dimension is known."""
    return declared is not None and None not in declared


def known(shape: PartialShape | None) -> Shape:
    """Return a shape of which every dimension is known."""
    return tuple(dim for dim in shape or () if dim is not None)


def size_of(shape: Sequence[int | None]) -> int:
    """Return the number of elements of a fixed shape."""
    return math.prod(dim for dim in shape if dim is not None)


def compatible(shape: Shape, declared: PartialShape | None) -> bool:
    """Return whether a shape fits a declared one, without broadcasting."""
    if declared is None:
        return True
    return len(shape) == len(declared) and all(
        want is None or have == want for have, want in zip(shape, declared, strict=True)
    )
