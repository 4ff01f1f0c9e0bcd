"""Results of gradients: the `Receipt` of one, the `Counters` of all."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import index
from typing import Any

import numpy as np

from hpcaccum.errors import InvalidArgumentError
from hpcaccum.mpi import AtomicWords

# Lags of this and more are counted together.
MAX_LAG = 31


@dataclass(frozen=True)
class Receipt:
    """The outcome for one gradient; true if it was accepted.

    Attributes:
        accepted: Whether it was added.
        local_step: The step at which it was computed.
        global_step: The step of the accumulator or optimizer when it arrived.
        sent: False for a local step of `AGNOptimizer`, whose gradient is part of a
            later push; otherwise True.
        nonfinite: Whether it was dropped because it contains a NaN or an infinity.
        factor: What multiplies it in its update: less than 1 if it is late and the
            optimizer has ``lateness``.
        loss: What the loss returned as its value, from ``minimize``; otherwise None. It
            is not compared.
    """

    accepted: bool
    local_step: int
    global_step: int
    sent: bool = True
    nonfinite: bool = False
    factor: float = 1.0
    loss: Any = field(default=None, compare=False)

    def __bool__(self) -> bool:
        """Return whether the gradient was accepted."""
        return self.accepted

    def __str__(self) -> str:
        """Show the outcome, such as ``not accepted: stale, lag 3, step 7``."""
        outcome = "accepted" if self.accepted else f"not accepted: {self.reason}"
        sent = "" if self.sent else ", not sent"
        return f"{outcome}{sent}, lag {self.lag}, step {self.global_step}"

    @property
    def lag(self) -> int:
        """How many steps the gradient was late."""
        return self.global_step - self.local_step

    @property
    def reason(self) -> str:
        """Why it was dropped: "stale" or "nonfinite"; empty if it was accepted."""
        if self.accepted:
            return ""
        return "nonfinite" if self.nonfinite else "stale"

    def shown(self) -> dict[str, Any]:
        """Return what a trace shows of it."""
        return {"accepted": self.accepted, "lag": self.lag, "step": self.global_step}


@dataclass(frozen=True)
class Tally:
    """How many gradients of each rank were accepted and dropped, and their lags.

    Attributes:
        accepted, dropped: One number per rank.
        lags: How many accepted and dropped gradients of all ranks had each lag. A
            negative lag counts as 0, one above `MAX_LAG` as `MAX_LAG`.
        nonfinite: One number per rank: gradients that an optimizer dropped because they
            contain a NaN or an infinity. ``dropped`` and ``lags`` do not count them.
    """

    accepted: tuple[int, ...]
    dropped: tuple[int, ...]
    lags: dict[int, int]
    nonfinite: tuple[int, ...] = ()

    def __add__(self, other: Tally) -> Tally:
        """Return the counts of two runs; their numbers of ranks may differ."""
        lags = {
            lag: self.lags.get(lag, 0) + other.lags.get(lag, 0)
            for lag in sorted(self.lags.keys() | other.lags.keys())
        }
        return Tally(
            _added(self.accepted, other.accepted),
            _added(self.dropped, other.dropped),
            lags,
            _added(self.nonfinite, other.nonfinite),
        )

    def as_lists(self) -> dict[str, Any]:
        """Return the counts in lists; each lag and its count are a pair."""
        return {
            "accepted": list(self.accepted),
            "dropped": list(self.dropped),
            "nonfinite": list(self.nonfinite),
            "lags": [list(pair) for pair in self.lags.items()],
        }

    @classmethod
    def of_lists(cls, lists: Mapping[str, Any]) -> Tally:
        """Return the tally whose `as_lists` returned ``lists``.

        Raises:
            InvalidArgumentError: If they are something else.
        """
        try:
            rows = lists["accepted"], lists["dropped"], lists["nonfinite"]
            accepted, dropped, nonfinite = (tuple(map(index, row)) for row in rows)
            lags = {index(lag): index(count) for lag, count in lists["lags"]}
            numbers = *accepted, *dropped, *nonfinite, *lags, *lags.values()
            if min(numbers, default=0) < 0:
                raise ValueError(f"a count is {min(numbers)}")
        except (TypeError, ValueError, KeyError) as error:
            raise InvalidArgumentError(
                f"the tally of a snapshot cannot be read: {error!r}"
            ) from None
        return cls(accepted, dropped, lags, nonfinite)


def _added(these: tuple[int, ...], those: tuple[int, ...]) -> tuple[int, ...]:
    pairs = itertools.zip_longest(these, those, fillvalue=0)
    return tuple(left + right for left, right in pairs)


# The first columns of a row: each gradient changes one. That of an accepted or dropped
# one is further to the right by its lag.
_NONFINITE, _ACCEPTED = range(2)
_DROPPED = _ACCEPTED + MAX_LAG + 1


class Counters:
    """One row of counters per rank, which it writes, or an agent while it waits."""

    _WIDTH = _DROPPED + MAX_LAG + 1

    def __init__(self, words: AtomicWords, base: int, size: int) -> None:
        self._words, self._base, self._size = words, base, size

    @classmethod
    def words(cls, size: int) -> int:
        """Return the number of words for ``size`` ranks."""
        return size * cls._WIDTH

    def count(self, rank: int, accepted: bool, lag: int) -> None:
        """Count a gradient; on the node of the words. A later `write` publishes it."""
        column = (_ACCEPTED if accepted else _DROPPED) + min(max(lag, 0), MAX_LAG)
        self._words.memory[self._base + rank * self._WIDTH + column] += 1

    def count_nonfinite(self, rank: int) -> None:
        """Count a gradient that is not finite, and was not submitted."""
        self._words.fetch_add(self._base + rank * self._WIDTH + _NONFINITE, 1)

    def tally(self) -> Tally:
        """Return the counts of all ranks."""
        words = self._words.read_range(self._base, self.words(self._size))
        rows = np.array(words).reshape(self._size, self._WIDTH)
        accepted, dropped = rows[:, _ACCEPTED:_DROPPED], rows[:, _DROPPED:]
        lags = (accepted + dropped).sum(axis=0).tolist()
        return Tally(
            tuple(accepted.sum(axis=1).tolist()),
            tuple(dropped.sum(axis=1).tolist()),
            {lag: number for lag, number in enumerate(lags) if number},
            tuple(rows[:, _NONFINITE].tolist()),
        )
