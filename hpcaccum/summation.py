"""Sums of vectors at the speed of memory, in a fixed order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from hpcaccum.worker_threads import run_pieces

if TYPE_CHECKING:
    from collections.abc import Sequence

Array = np.ndarray[Any, Any]

# Elements that are summed while they are in the cache.
_CHUNK = 1 << 16
# Elements for which one more thread is worth the time that it takes to wake it.
_SHARE = 1 << 20


def add_in_order(
    parts: Sequence[Array], out: Array, divisor: int = 1, threads: int = 1
) -> None:
    """Set ``out`` to the sum of vectors, from the first to the last, over ``divisor``.

    By chunks that stay in the cache. Whichever is wider, the dtype of the parts or that
    of ``out``, is the one in which they are added and divided. The bits are the same
    with any number of threads; a short vector has one.
    """
    if threads == 1 or out.size <= _SHARE:
        _add_chunks(parts, out, divisor)
        return
    share = max(_SHARE, -(-out.size // threads))

    def add(start: int) -> None:
        piece = slice(start, start + share)
        # Each thread has an error state of its own.
        with np.errstate(all="ignore"):
            _add_chunks([part[piece] for part in parts], out[piece], divisor)

    run_pieces(add, range(0, out.size, share), threads - 1)


def _add_chunks(parts: Sequence[Array], out: Array, divisor: int) -> None:
    dtype, scratch = out.dtype, None
    if dtype != parts[0].dtype:
        dtype = np.promote_types(dtype, parts[0].dtype)
        scratch = None if dtype == out.dtype else np.empty(_CHUNK, dtype)
    if out.size <= _CHUNK and scratch is None:
        add_at_once(parts, out, divisor)
        return
    for start in range(0, out.size, _CHUNK):
        piece = slice(start, start + _CHUNK)
        place = out[piece]
        chunk = place if scratch is None else scratch[: place.size]
        add_at_once([part[piece] for part in parts], chunk, divisor)
        if scratch is not None:
            np.copyto(place, chunk, casting="same_kind")


def add_at_once(parts: Sequence[Array], out: Array, divisor: int) -> None:
    """Do as `add_in_order` for vectors so short that they stay in the cache."""
    dtype = out.dtype
    if len(parts) == 1:
        out[...] = parts[0]
    else:
        np.add(parts[0], parts[1], out, dtype=dtype)
    for part in parts[2:]:
        np.add(out, part, out, dtype=dtype)
    divide(out, divisor)


def divide(total: Array, count: int) -> None:
    """Divide a vector in place by a count, as one true division in its dtype."""
    if count & (count - 1):
        np.divide(total, total.dtype.type(count), out=total)
    elif count != 1:
        # By a power of 2: the same bits, in less time.
        np.multiply(total, total.dtype.type(1 / count), out=total)
