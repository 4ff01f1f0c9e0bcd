"""Gradients that are not finite, and gradients that are too large."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal, get_args

import numpy as np

from hpcaccum.arguments import one_of
from hpcaccum.device import cupy, is_device, largest
from hpcaccum.dtypes import Array, accumulation_dtype
from hpcaccum.errors import InvalidArgumentError
from hpcaccum.optimizers.base import with_factor
from hpcaccum.optimizers.checks import Pairs, PairsLike, check_pairs
from hpcaccum.optimizers.slices import Gradient
from hpcaccum.optimizers.update_rule import checked_number
from hpcaccum.rows import IndexedSlices, rows_of

# What `on_nonfinite=` accepts.
OnNonfinite = Literal["accept", "drop", "raise"]


def check_choice(on_nonfinite: OnNonfinite) -> OnNonfinite:
    """Return a choice; raise InvalidArgumentError unless it is one."""
    one_of("on_nonfinite", on_nonfinite, get_args(OnNonfinite))
    return on_nonfinite


def to_drop(
    what: str,
    grads: Iterable[tuple[str, Gradient | None, np.dtype[Any]]],
    on_nonfinite: OnNonfinite,
) -> bool:
    """Return whether gradients are not finite and shall be dropped."""
    if on_nonfinite == "accept":
        return False
    given = [
        (name, grad, accumulation_dtype(dtype))
        for name, grad, dtype in grads
        if grad is not None
    ]
    tops = _largest_on_device([grad for _, grad, _ in given])
    with np.errstate(all="ignore"):
        for i, (name, grad, exchanged) in enumerate(given):
            if _is_finite(grad, exchanged, tops.get(i)):
                continue
            if on_nonfinite == "drop":
                return True
            raise InvalidArgumentError(
                f"{what}: the gradient of {name!r} has a NaN or an infinity in "
                f"{exchanged}"
            )
    return False


def _largest_on_device(grads: Sequence[Gradient]) -> dict[int, float]:
    """Return the largest values of gradients on a device, by index, in one copy."""
    arrays = [g.values if isinstance(g, IndexedSlices) else g for g in grads]
    there = [i for i, array in enumerate(arrays) if is_device(array)]
    return dict(zip(there, largest([arrays[i] for i in there]), strict=True))


def _is_finite(grad: Gradient, dtype: np.dtype[Any], top: float | None) -> bool:
    """Return whether a gradient is finite in the dtype in which it is exchanged."""
    if isinstance(grad, IndexedSlices):
        bound = _largest(grad.values) if top is None else top
        # No sum of rows is larger. False if there is a NaN.
        if bound * len(grad.indices) <= _limit(dtype):
            return True
        # Repeated rows are added.
        return bool(np.isfinite(rows_of(grad, dtype).values).all())
    if top is not None or not np.can_cast(grad.dtype, dtype):
        return (_largest(grad) if top is None else top) <= _limit(dtype)
    # One pass, without new memory. A sum is finite only if all terms are; if it is
    # not, finite terms may have overflowed.
    return bool(np.isfinite(grad.sum())) or bool(np.isfinite(grad).all())


@functools.cache
def _limit(dtype: np.dtype[Any]) -> float:
    return float(np.finfo(dtype).max)


def _largest(array: Array) -> float:
    """Return the largest absolute value; NaN if there is one."""
    if not array.size:
        return 0.0
    low, high = float(array.min()), float(array.max())
    return high if math.isnan(low + high) else max(-low, high)


def clip_by_global_norm(
    grads_and_vars: PairsLike, clip_norm: float
) -> tuple[Pairs, float]:
    """Scale gradients down so that the norm of all of them is at most ``clip_norm``.

    For use between `compute_gradients` and `apply_gradients`. It sees the gradients of
    this rank, before they are exchanged.

    Args:
        grads_and_vars: Pairs as `compute_gradients` returns them.
        clip_norm: A number of at least 0.

    Returns:
        The pairs, with new arrays if they are scaled; and the norm before. If it is
        not finite, the gradients are those given.

    Raises:
        InvalidArgumentError, TypeError: If the pairs or the norm are invalid.

    Source: Pascanu et al., On the difficulty of training recurrent neural networks,
        2013 (arXiv:1211.5063).
    """
    pairs = check_pairs(grads_and_vars)
    limit = checked_number(clip_norm, "clip_norm", 0)
    norm = _norm(grad for grad, _ in pairs if grad is not None)
    if not limit < norm < math.inf:
        return pairs, norm
    factor = limit / norm
    return with_factor(pairs, factor), norm


def _norm(grads: Iterable[Gradient]) -> float:
    """Return the square root of the sum of all squares, computed in float64."""
    wide = (_elements(grad).astype(np.float64).ravel() for grad in grads)
    squares: list[Any] = [flat @ flat for flat in wide]
    there = [square for square in squares if is_device(square)]
    here = [float(square) for square in squares if not is_device(square)]
    # One copy from the device for all.
    return math.sqrt(sum(here) + sum(cupy().stack(there).tolist() if there else []))


def _elements(grad: Gradient) -> Array:
    """Return the elements of a gradient that may not be zero."""
    if not isinstance(grad, IndexedSlices):
        return grad
    return rows_of(grad, np.dtype(np.float64)).values
