"""Sums of vectors in a fixed order, and copies, at the bandwidth of memory.

One core does not reach it: a rank that has several uses a thread on each.
"""

from __future__ import annotations

import contextvars
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hpcaccum.dtypes import Array, quiet
from hpcaccum.worker_threads import run_pieces

# Elements of a chunk that stays in the cache while it is summed.
_CHUNK = 1 << 16
# Elements from which on several threads are faster than one, and the fewest for each:
# waking one takes as long as adding some 100,000.
_SHARED, _SHARE = 1 << 20, 1 << 18


def add_in_order(
    parts: Sequence[Array],
    out: Array,
    divisor: float = 1,
    threads: int = 1,
    factors: Sequence[float] = (),
) -> None:
    """Set ``out`` to the sum of vectors, times their factors, divided by ``divisor``.

    The parts are added from the first to the last, by chunks that stay in the cache, in
    the wider of their dtype and that of ``out``, which may be the first part. The bits
    of the result do not depend on the number of threads; a short vector uses one. A
    factor of 1 changes no bit.
    """
    if threads == 1 or out.size < _SHARED:
        _add_chunks(parts, out, divisor, factors)
        return
    share = max(_SHARE, -(-out.size // threads))

    def add(start: int) -> None:
        piece = slice(start, start + share)
        # NumPy's error state is per thread.
        with quiet():
            pieces = [part[piece] for part in parts]
            _add_chunks(pieces, out[piece], divisor, factors)

    run_pieces(add, range(0, out.size, share), threads - 1)


def _add_chunks(
    parts: Sequence[Array], out: Array, divisor: float, factors: Sequence[float]
) -> None:
    dtype, scratch = out.dtype, None
    if dtype != parts[0].dtype:
        dtype = np.promote_types(dtype, parts[0].dtype)
        scratch = None if dtype == out.dtype else np.empty(_CHUNK, dtype)
    if out.size <= _CHUNK and scratch is None:
        add_at_once(parts, out, divisor, factors)
        return
    products = np.empty(_CHUNK, dtype) if factors else None
    for start in range(0, out.size, _CHUNK):
        piece = slice(start, start + _CHUNK)
        place = out[piece]
        chunk = place if scratch is None else scratch[: place.size]
        pieces = [part[piece] for part in parts]
        add_at_once(pieces, chunk, divisor, factors, products)
        if scratch is not None:
            np.copyto(place, chunk, casting="same_kind")


def copy_pieces(
    pairs: Sequence[tuple[Array, Array]], threads: int = 1, factor: float = 1.0
) -> None:
    """Copy vectors, pairs of a target and its source, with conversion; see `fill`."""
    total = sum([target.size for target, _ in pairs])
    if threads == 1 or total < _SHARED:
        for target, source in pairs:
            fill(target, source, factor)
        return
    share = max(_SHARE, -(-total // threads))
    pieces = [
        (target[start : start + share], source[start : start + share])
        for target, source in pairs
        for start in range(0, target.size, share)
    ]

    def copy(piece: tuple[Array, Array]) -> None:
        # NumPy's error state is per thread.
        with quiet():
            fill(*piece, factor)

    run_pieces(copy, pieces, threads - 1)


def fill(target: Array, source: Array, factor: float) -> None:
    """Set an array to another one, with conversion, times a factor."""
    if factor == 1:
        np.copyto(target, source, casting="same_kind")
        return
    with quiet():
        np.multiply(source, target.dtype.type(factor), target, dtype=target.dtype)


def add_at_once(
    parts: Sequence[Array],
    out: Array,
    divisor: float,
    factors: Sequence[float] = (),
    scratch: Array | None = None,
) -> None:
    """Do what `add_in_order` does, for vectors that fit in the cache.

    ``scratch`` has the dtype of ``out``, and its size or more.
    """
    dtype = out.dtype
    if not factors or set(factors) == {1}:
        if len(parts) == 1:
            out[...] = parts[0]
        else:
            np.add(parts[0], parts[1], out, dtype=dtype)
        for part in parts[2:]:
            np.add(out, part, out, dtype=dtype)
    else:
        scratch = np.empty_like(out) if scratch is None else scratch[: out.size]
        total = parts[0]
        if factors[0] != 1:
            total = np.multiply(total, dtype.type(factors[0]), out, dtype=dtype)
        for part, factor in zip(parts[1:], factors[1:], strict=True):
            if factor != 1:
                part = np.multiply(part, dtype.type(factor), scratch, dtype=dtype)
            total = np.add(total, part, out, dtype=dtype)
    divide(out, divisor)


def divide(total: Array, divisor: float) -> None:
    """Divide a vector in place, with one rounding in its dtype."""
    if divisor > 1 and math.frexp(divisor)[0] == 0.5:
        # For a power of 2 the product has the same bits, and is faster.
        np.multiply(total, total.dtype.type(1 / divisor), out=total)
    elif divisor != 1:
        np.divide(total, total.dtype.type(divisor), out=total)


class Quiet:
    """Calls functions without warnings: an overflow shows up as inf in the result.

    `quiet` does the same, and costs a microsecond each time.
    """

    def __init__(self) -> None:
        self._context = contextvars.copy_context()
        self._modern = int(np.__version__.split(".")[0]) >= 2
        if self._modern:
            self._context.run(np.seterr, all="ignore")

    def __call__(self, function: Callable[..., None], *args: Any) -> None:
        """Call ``function(*args)``."""
        if self._modern:
            self._context.run(function, *args)
        else:
            with quiet():
                function(*args)
