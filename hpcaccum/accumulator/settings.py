"""The arguments of an accumulator, checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from hpcaccum.accumulator.shapes import PartialShape, declared_shape, is_fixed, size_of
from hpcaccum.accumulator.storage import Slots, Sums
from hpcaccum.arguments import positive_count, rank_number
from hpcaccum.dtypes import float_dtype
from hpcaccum.errors import InvalidArgumentError

REDUCTIONS = ("MEAN", "SUM")
STORAGES = ("auto", Slots.name, Sums.name)


@dataclass(frozen=True)
class Settings:
    """The checked arguments of an accumulator; the same on all ranks."""

    dtype: np.dtype[Any]
    shape: PartialShape | None
    shared_name: str
    reduction: str
    host: int
    capacity: int
    storage: str
    workers: int


def check_settings(
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
    """Check the constructor's arguments; ``size`` is the number of ranks."""
    kind, declared = float_dtype(dtype), declared_shape(shape)
    if not isinstance(reduction, (str, type(None))):
        raise TypeError(f"reduction_type must be text, got {reduction!r}")
    if (reduction := "MEAN" if reduction is None else reduction) not in REDUCTIONS:
        raise InvalidArgumentError(
            f"reduction_type must be one of {REDUCTIONS}, got {reduction!r}"
        )
    if storage not in STORAGES:
        raise InvalidArgumentError(
            f"storage must be one of {STORAGES}, got {storage!r}"
        )
    if shared_name is not None and not isinstance(shared_name, str):
        raise TypeError(f"shared_name must be text, got {shared_name!r}")
    if is_fixed(declared):
        capacity = size_of(declared or ())
    elif capacity is None:
        raise InvalidArgumentError(
            f"shape {declared} is not fixed: capacity=, the most elements of a "
            f"gradient, is needed"
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
        capacity if is_fixed(declared) else positive_count(capacity, "capacity"),
        storage,
        number,
    )
