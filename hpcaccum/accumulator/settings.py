"""The arguments of an accumulator, checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from hpcaccum.accumulator.shapes import PartialShape, declared_shape, is_fixed, size_of
from hpcaccum.accumulator.storage import Slots, Sums
from hpcaccum.arguments import one_of, positive_count, rank_number
from hpcaccum.dtypes import float_dtype
from hpcaccum.errors import InvalidArgumentError

REDUCTIONS = ("MEAN", "SUM")
STORAGES = ("auto", Slots.name, Sums.name)


@dataclass(frozen=True)
class Settings:
    """The checked arguments of an accumulator; the same on all ranks.

    Attributes:
        dtype: Of gradients and results.
        shape: As declared; None or None entries are unknown.
        shared_name: Empty if the accumulator is not shared.
        reduction: ``"MEAN"`` or ``"SUM"``.
        host: The rank that holds the words.
        capacity: Maximum number of elements of a gradient.
        storage: ``"auto"``, ``"slots"`` or ``"sum"``.
        workers: How many ranks contribute gradients. If not all, the host does not.
    """

    dtype: np.dtype[Any]
    shape: PartialShape | None
    shared_name: str
    reduction: str
    host: int
    capacity: int
    storage: str
    workers: int


def check_settings(
    *,
    dtype: Any,
    shape: Any,
    shared_name: Any,
    reduction: Any,
    host: Any,
    capacity: Any,
    storage: Any,
    workers: Any,
    size: int,
) -> Settings:
    """Check the constructor's arguments; ``size`` is the number of ranks.

    Raises:
        TypeError, InvalidArgumentError: If one of them cannot be used.
    """
    kind, declared = float_dtype(dtype), declared_shape(shape)
    if not isinstance(reduction, (str, type(None))):
        raise TypeError(f"reduction_type must be text, got {reduction!r}")
    reduction = "MEAN" if reduction is None else reduction
    one_of("reduction_type", reduction, REDUCTIONS)
    one_of("storage", storage, STORAGES)
    if shared_name is not None and not isinstance(shared_name, str):
        raise TypeError(f"shared_name must be text, got {shared_name!r}")
    if not is_fixed(declared) and capacity is None:
        raise InvalidArgumentError(
            f"shape {declared} is not fixed: capacity=, the maximum number of elements "
            f"of a gradient, is needed"
        )
    number = positive_count(workers, "workers")
    if number > size:
        raise InvalidArgumentError(
            f"workers is at most the number of ranks, {size}, got {number}"
        )
    return Settings(
        kind,
        declared,
        shared_name or "",
        reduction,
        rank_number(host, size, "host"),
        size_of(declared or ())
        if is_fixed(declared)
        else positive_count(capacity, "capacity"),
        storage,
        number,
    )
