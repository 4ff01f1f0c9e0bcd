"""The checked arguments of an accumulator, and shapes of which parts are unknown."""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hpcaccum.arguments import REDUCTIONS, one_of, positive_count, rank_number
from hpcaccum.dtypes import float_dtype
from hpcaccum.errors import InvalidArgumentError
from hpcaccum.rows import RowPlace

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
    shared_name: str = ""
    reduction: str = "MEAN"
    host: int = 0
    capacity: int = 0
    storage: str = SLOTS
    workers: int = 1
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
    declared = settings.shape
    if not is_fixed(declared):
        if capacity is None:
            raise InvalidArgumentError(
                f"shape {declared} is not fixed: pass capacity=, the maximum number of "
                f"elements of a gradient"
            )
        elements = positive_count(capacity, "capacity")
    else:
        what = f"elements of shape {declared}"
        elements = _at_least("capacity", capacity, math.prod(known(declared)), what)
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
    row = None if shape is None else shape[1:]
    if is_fixed(row):
        what = f"elements of a row of shape {shape}"
        width = _at_least("row_size", row_size, math.prod(known(row)), what)
    elif row_size is None:
        raise InvalidArgumentError(
            f"shape {shape} has rows of unknown size: pass row_size=, the maximum "
            f"number of elements of a row"
        )
    else:
        width = positive_count(row_size, "row_size")
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
    found, declared = float_dtype(dtype), declared_shape(shape)
    if shared_name is not None and not isinstance(shared_name, str):
        raise TypeError(f"shared_name must be text, got {shared_name!r}")
    reduction = "MEAN" if reduction is None else reduction
    if not isinstance(reduction, str):
        raise TypeError(f"reduction_type must be text, got {reduction!r}")
    one_of("reduction_type", reduction, REDUCTIONS)
    root = rank_number(host, size, "host")
    number = size if workers is None else positive_count(workers, "workers")
    if number > size:
        raise InvalidArgumentError(
            f"workers must be at most the number of ranks, {size}, got {number}"
        )
    return Settings(found, declared, shared_name or "", reduction, root, workers=number)


def _at_least(name: str, given: Any, least: int, what: str) -> int:
    """Return a limit, which may be given if it is not less than what is needed."""
    number = least if given is None else positive_count(given, name)
    if number < least:
        raise InvalidArgumentError(
            f"{name} must be at least the {least} {what}, got {number}"
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


def compatible(shape: Shape, declared: PartialShape | None) -> bool:
    """Return whether a shape fits a declared one, without broadcasting."""
    if declared is None:
        return True
    return len(shape) == len(declared) and all(
        want is None or have == want for have, want in zip(shape, declared, strict=True)
    )
