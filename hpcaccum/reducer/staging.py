"""Copies between the caller's arrays and the memory of a schedule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from hpcaccum.device import copyto
from hpcaccum.dtypes import Array
from hpcaccum.layout import Layout
from hpcaccum.overlap import crossing, overlap
from hpcaccum.summation import copy_pieces, fill

# Mean bytes of an array from which on copying by pieces pays.
_COARSE = 32 << 10
# Buckets of a rank's inputs that are in use at once: one is filled while the other
# ranks sum the one before and may still read the one before that.
_STAGES = 3


def copy(
    source: Mapping[str, Array], target: Mapping[str, Array], factor: float = 1.0
) -> None:
    """Copy arrays to others of the same names, with conversion, times a factor."""
    for name in target if len(target) < len(source) else source:
        given, place = source[name], target[name]
        if factor != 1:
            fill(place, given, factor)
        elif type(given) is type(place):
            place[...] = given
        else:
            copyto(place, given)


def stages(buckets: list[slice]) -> list[slice]:
    """Return where each bucket lies if it is copied in by `Staging`.

    The places of the first buckets are used again and again, and stay in the cache: of
    the copy to them, memory sees only the reading.
    """
    starts = [buckets[number % _STAGES].start for number in range(len(buckets))]
    sizes = [bucket.stop - bucket.start for bucket in buckets]
    return [
        slice(start, start + size) for start, size in zip(starts, sizes, strict=True)
    ]


class StagedCopies(NamedTuple):
    """The arrays of one call that are copied by pieces, as vectors."""

    # All that this rank contributes, or none.
    inputs: Mapping[str, Array]
    # Results are copied to these; and to others, as a whole.
    out: Mapping[str, Array]
    rest: Mapping[str, Array]


class Staging:
    """Copies large arrays in and out bucket by bucket, while others are summed.

    Of each bucket this rank sums one of ``stripes``.
    """

    def __init__(
        self,
        layout: Layout,
        buckets: list[slice],
        stripes: list[slice],
        sent: Array,
        received: Array,
        threads: int = 1,
    ) -> None:
        self._threads = threads
        self._sent, self._received, self._buckets = sent, received, buckets
        self._stages = stages(buckets)
        self._overlaps = [layout.overlaps(bucket) for bucket in buckets]
        self._inside = [_inside(layout, stripe) for stripe in stripes]
        # Pieces of arrays take microseconds each, more than small arrays gain.
        self._worthwhile = layout.nbytes >= _COARSE * len(layout)
        self._count = len(layout)

    def select(
        self, inputs: Mapping[str, Array], out: Mapping[str, Array]
    ) -> StagedCopies:
        """Select the arrays of a call that are copied by pieces."""
        if not self._worthwhile:
            return StagedCopies({}, {}, out)
        # Those outside this rank's inputs, which other ranks still read.
        vectors = _vectors(out).items()
        targets = {n: each for n, each in vectors if not overlap(each, self._sent)}
        rest = {name: array for name, array in out.items() if name not in targets}
        return StagedCopies(self._sources(inputs, out), targets, rest)

    def _sources(
        self, inputs: Mapping[str, Array], out: Mapping[str, Array]
    ) -> Mapping[str, Array]:
        # Stages overwrite what lies in the reducer's own arrays.
        if len(inputs) < self._count:
            return {}
        sources = _vectors(inputs)
        if len(sources) < len(inputs):
            return {}
        # Each piece is read late. Until then nothing may be written to it: no other
        # piece in its stage, no sum, no result.
        memory = (self._sent, self._received)
        if any(overlap(each, own) for each in sources.values() for own in memory):
            return {}
        # An input that is its own target is apart from the other targets, as these are.
        others = [array for name, array in inputs.items() if out.get(name) is not array]
        return {} if any(crossing(others, out.values())) else sources

    def direct(self, number: int, inputs: Mapping[str, Array]) -> Array | None:
        """Return this rank's input to its own stripe, if it need not be copied.

        It need not if it lies in one array, of the dtype of the buffer.
        """
        inside = self._inside[number]
        if inside is None or (array := inputs.get(inside[0])) is None:
            return None
        return array[inside[1]] if array.dtype == self._sent.dtype else None

    def fill(self, number: int, inputs: Mapping[str, Array], scale: float) -> None:
        """Copy one bucket times a scale to its stage, without what `direct` returns."""
        skipped = None
        if self.direct(number, inputs) is not None:
            skipped = self._inside[number]
        place, pairs = self._sent[self._stages[number]], []
        for name, elements, where in self._overlaps[number]:
            if name not in inputs:
                continue
            pieces = [elements]
            if skipped and skipped[0] == name:
                pieces = _around(elements, skipped[1])
            for piece in pieces:
                begin = where.start + piece.start - elements.start
                target = place[begin : begin + piece.stop - piece.start]
                pairs.append((target, inputs[name][piece]))
        copy_pieces(pairs, self._threads, scale)

    def drain(self, number: int, out: Mapping[str, Array]) -> None:
        """Copy one bucket of the results to arrays."""
        total = self._received[self._buckets[number]]
        pairs = [
            (out[name][elements], total[where])
            for name, elements, where in self._overlaps[number]
            if name in out
        ]
        copy_pieces(pairs, self._threads)

    def free(self) -> None:
        """Release the memory."""
        self._sent = self._received = np.empty(0, self._sent.dtype)


def _vectors(arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Return those arrays that can be viewed as vectors in CPU memory."""
    return {
        name: array.reshape(-1)
        for name, array in arrays.items()
        if type(array) is np.ndarray and array.flags.c_contiguous
    }


def _inside(layout: Layout, piece: slice) -> tuple[str, slice] | None:
    """Return the one array in which a piece of the buffer lies, and where in it."""
    for name, elements, where in layout.overlaps(piece):
        if where == slice(0, piece.stop - piece.start):
            return name, elements
    return None


def _around(whole: slice, part: slice) -> list[slice]:
    """Return what precedes and what follows a part."""
    pieces = [slice(whole.start, part.start), slice(part.stop, whole.stop)]
    return [piece for piece in pieces if piece.start < piece.stop]
