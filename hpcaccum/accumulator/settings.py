"""The checked arguments of an accumulator, and shapes of which parts are unknown."""

from __future__ import annotations

import math
import numbers
import operator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcaccum.arguments import REDUCTIONS, one_of, positive_count, rank_number
from hpcaccum.dtypes import float_dtype
from hpcaccum.errors import InvalidArgumentError
from hpcaccum.rows import RowPlace

if TYPE_CHECKING:
    from collections.abc import Sequence

# What `storage=` may be; ROWS is that of sparse accumulators.
STORAGES = SLOTS, SUM = "slots", "sum"
ROWS = "rows"

Shape = tuple[int, ...]
PartialShape = tuple["int | None", ...]

MAX_DIMS = 16


@dataclass(frozen=True)
class Settings:
    """The checked arguments of an accumulator; the same on all ranks.

    Attributes:
        dtype: Of gradients and results.
        shape: As declared; None or None entries are unknown.
        shared_name: Empty if the accumulator is not shared.
        reduction: ``"MEAN"`` or ``"SUM"``.
        host: The rank on whose node are the words.
        capacity: Maximum number of elements of a gradient; if sparse, of rows.
        storage: ``"slots"`` or ``"sum"``; if sparse, ``"rows"``.
        workers: How many ranks contribute gradients. If not all, the host does not.
        row_size: If sparse, maximum number of elements of a row, else 0.
        rows: The places of rows in a gradient that is a vector, at its end.
        late: What multiplies the weight of a gradient that is one step late; 0 if it is
            stale.
    """

    dtype: np.dtype[Any]
    shape: PartialShape | None
    shared_name: str
    reduction: str
    host: int
    capacity: int
    storage: str
    workers: int
    row_size: int = 0
    rows: Sequence[RowPlace] = ()
    late: float = 0.0

    @property
    def is_sparse(self) -> bool:
        """Whether gradients have some rows only."""
        return self.storage == ROWS

    @property
    def has_one_shape(self) -> bool:
        """Whether all gradients have one shape."""
        return is_fixed(self.shape) and not self.is_sparse


def check_settings(
    size: int, given: tuple[Any, ...], capacity: Any, storage: Any
) -> Settings:
    """Check the arguments of a constructor; ``size`` is the number of ranks.

    ``given`` are those that all constructors have: see `_common`.
    """
    settings = _common(size, *given)
    one_of("storage", storage, STORAGES)
    if not is_fixed(settings.shape) and capacity is None:
        raise InvalidArgumentError(
            f"shape {settings.shape} is not fixed: pass capacity=, the maximum number "
            f"of elements of a gradient"
        )
    elements = _capacity(capacity, settings.shape)
    return replace(settings, capacity=elements, storage=storage)


def check_sparse_settings(
    size: int, given: tuple[Any, ...], capacity: Any, row_size: Any
) -> Settings:
    """Check the arguments of a sparse accumulator; see `check_settings`."""
    settings = _common(size, *given)
    if capacity is None:
        raise InvalidArgumentError(
            "pass capacity=, the maximum number of rows of a rank in one round"
        )
    # TensorFlow uses () for a shape that is not known.
    shape, rows = settings.shape or None, positive_count(capacity, "capacity")
    width = _row_size(row_size, shape)
    return replace(settings, shape=shape, capacity=rows, storage=ROWS, row_size=width)


def _common(
    size: int,
    dtype: Any,
    shape: Any,
    shared_name: Any,
    reduction: Any,
    host: Any,
    workers: Any,
) -> Settings:
    """Check what all constructors have; the rest is to be replaced."""
    return Settings(
        float_dtype(dtype),
        declared_shape(shape),
        _shared_name(shared_name),
        _reduction(reduction),
        rank_number(host, size, "host"),
        0,
        "",
        _workers(workers, size),
    )


def _capacity(capacity: Any, declared: PartialShape | None) -> int:
    """Return the number of elements that a gradient has at most."""
    if declared is None or not is_fixed(declared):
        return positive_count(capacity, "capacity")
    size = size_of(declared)
    if capacity is not None and positive_count(capacity, "capacity") < size:
        raise InvalidArgumentError(
            f"capacity must be at least the {size} elements of shape {declared}, "
            f"got {capacity}"
        )
    return size


def _row_size(row_size: Any, declared: PartialShape | None) -> int:
    """Return the maximum number of elements of a row."""
    row = None if declared is None else declared[1:]
    least = size_of(known(row)) if is_fixed(row) else None
    if row_size is not None:
        size = positive_count(row_size, "row_size")
        if least is not None and size < least:
            raise InvalidArgumentError(
                f"row_size must be at least the {least} elements of a row of shape "
                f"{declared}, got {size}"
            )
        return size
    if least is None:
        raise InvalidArgumentError(
            f"shape {declared} has rows of unknown size: pass row_size=, the maximum "
            f"number of elements of a row"
        )
    return least


def _reduction(reduction: Any) -> str:
    if reduction is None:
        return "MEAN"
    if not isinstance(reduction, str):
        raise TypeError(f"reduction_type must be text, got {reduction!r}")
    one_of("reduction_type", reduction, REDUCTIONS)
    return reduction


def _shared_name(shared_name: Any) -> str:
    if shared_name is not None and not isinstance(shared_name, str):
        raise TypeError(f"shared_name must be text, got {shared_name!r}")
    return shared_name or ""


def _workers(workers: Any, size: int) -> int:
    number = size if workers is None else positive_count(workers, "workers")
    if number > size:
        raise InvalidArgumentError(
            f"workers must be at most the number of ranks, {size}, got {number}"
        )
    return number


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
