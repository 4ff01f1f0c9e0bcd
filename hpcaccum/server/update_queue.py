"""The words of asynchronous updates: which gradient makes each of them.

A late gradient may get less weight, a factor, where dropping it would give it none.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from hpcaccum.accumulator import Counters, Membership, Receipt, WordLayout, admits
from hpcaccum.errors import EverybodyLeftError, InvalidArgumentError, format_ranks
from hpcaccum.mpi import bits, number_of
from hpcaccum.nodes import words_of

if TYPE_CHECKING:
    from hpcaccum.accumulator import Tally
    from hpcaccum.mpi import Group

# What `lateness=` accepts.
Lateness = Literal["inverse"] | Callable[[int], float] | None

# Larger lags have the factor of this one.
MOST = 1000
_SHOWN = 4

# On a cache line of its own: swaps of _STEP must not slow down reads of other words.
_FIXED = WordLayout()
_STEP = _FIXED.take(own_lines=True)
_APPLIED = _FIXED.take()
# One place per rank, followed by the words of `Membership`.
_HEAD = _FIXED.count
# A place has the step that an update makes, and whose gradient it is: its rank, and
# COPIED if the agent of the root's node has a copy. It is 0 before the first gradient.
# NOBODY stands for the rank of a gradient that is lost.
NOBODY = (1 << 20) - 1
COPIED, _WHOSE_BITS = NOBODY + 1, 21
# Whose gradient it is, and its factor.
Found = tuple[int, float]
# The intents of two ranks are on different cache lines.
_APART = 8


class UpdateQueue:
    """A queue of gradients for the root, with as many places as ranks. Collective.

    Gradients that are admitted and not applied have consecutive steps, at most as many
    as there are ranks, and each has a place of its own: that of its step. A second word
    of the place has the factor of the gradient, and is written first.

    Before a rank tries to have a gradient admitted, it sets a word, its intent, to the
    least step at which it may be, and clears it when the gradient is in its place. A
    step that was made, whose place is empty and for which no rank that is present has
    an open intent, is that of a rank that is lost.

    For the arguments see `BoundedStalenessInbox`, which has it as its base.

    Attributes:
        words: The words.
        membership: Which ranks have left.
        counters: What became of the gradients of each rank.
    """

    def __init__(
        self,
        group: Group,
        root: int,
        max_lag: float,
        workers: int,
        what: str,
        factors: Factors | None = None,
    ) -> None:
        self._rank, self._size, self._max_lag = group.rank, group.size, max_lag
        self._factors = factors
        # On the root, by step: gradients that are not applied. Once the rank of one has
        # the parameters, another one may get its place.
        self._found: dict[int, Found] = {}
        layout = WordLayout(after=_FIXED)
        layout.take(group.size)
        # The first of these words follows the places, so that one read returns both.
        self._members = layout.take(Membership.words(group.size))
        counters = layout.take(Counters.words(group.size))
        # The factor of each place, as bits.
        self._scales = layout.take(group.size)
        self._intents = layout.take(_APART * group.size, own_lines=True)
        self.words = words = words_of(group, root, layout.count, what)
        self.membership = Membership(
            words, self._members, group.rank, group.size, workers
        )
        self.counters = Counters(words, counters, group.size)

    @property
    def global_step(self) -> int:
        """The number of gradients admitted so far, plus the first step."""
        return self.words.read(_STEP)

    @property
    def applied(self) -> int:
        """The number of gradients applied so far, plus the first step."""
        return self.words.read(_APPLIED)

    def set_global_step(self, step: int, /) -> None:
        """Set the step of the first update; the root only, before any admission."""
        self.note_applied(step)
        self.words.write(_STEP, step)

    def note_applied(self, step: int) -> None:
        """Say that the gradients that make steps up to this one are applied."""
        self.words.write(_APPLIED, step)
        self._found.pop(step - 1, None)

    # Admission

    def admit(self, rank: int, local_step: int) -> Receipt:
        """Admit a gradient of a rank, unless it is stale. `end_intent` comes later."""
        step = self.global_step
        if self._max_lag == math.inf:
            self._set_intent(rank, 1 + step)
            step = self.words.fetch_add(_STEP, 1)
            return self._receipt(True, local_step, step)
        while admits(step, local_step, self._max_lag):
            self._set_intent(rank, 1 + step)
            found = self.words.compare_and_swap(_STEP, step, step + 1)
            if found == step:
                return self._receipt(True, local_step, step)
            step = found
        return self._receipt(False, local_step, step)

    def _receipt(self, accepted: bool, local_step: int, step: int) -> Receipt:
        receipt = Receipt(accepted, local_step, step)
        if accepted and self._factors is not None:
            return dataclasses.replace(receipt, factor=self._factors(receipt.lag))
        return receipt

    def _set_intent(self, rank: int, word: int) -> None:
        self.words.store_unordered(self._intents + _APART * rank, word)

    def end_intent(self, rank: int) -> None:
        """Say that the last gradient of a rank is in its place, or not admitted."""
        self._set_intent(rank, 0)

    def put(self, receipt: Receipt, whose: int) -> None:
        """Say whose gradient was admitted, with a receipt."""
        step = receipt.global_step
        if self._factors is not None:
            scale = self._scales + step % self._size
            self.words.write(scale, bits(receipt.factor))
        self.words.write(self._place(step), (step + 1) << _WHOSE_BITS | whose)

    def _place(self, step: int) -> int:
        return _HEAD + step % self._size

    # The root

    def find(self, step: int) -> Found | None:
        """Return what was put in the place for a step; None: nothing yet."""
        if step not in self._found:
            word = self.words.read(self._place(step))
            if word >> _WHOSE_BITS != step + 1:
                return None
            factor = 1.0
            if self._factors is not None:
                factor = number_of(self.words.read(self._scales + step % self._size))
            self._found[step] = word & ((1 << _WHOSE_BITS) - 1), factor
        return self._found[step]

    def find_final(self, step: int) -> Found | None:
        """Return as `find`, or that the gradient of a step is lost.

        Raises:
            EverybodyLeftError: If none can be admitted at this step.
        """
        if (found := self.find(step)) is not None:
            return found
        if self._is_lost(step):
            # It may have come since, which is final then.
            return self.find(step) or (NOBODY, 1.0)
        # A rank that has left has submitted all of its gradients before.
        everybody = self.membership.all_left(self.words.read(self._members))
        if everybody and self.global_step == step:
            raise EverybodyLeftError(f"all {self.membership.workers} ranks have left")
        return None

    def _is_lost(self, step: int) -> bool:
        """Whether a gradient, whose place was empty, was admitted and cannot come."""
        if self.global_step <= step or not (lost := self.membership.lost()):
            return False
        words = self.words.read_range(self._intents, _APART * self._size)[::_APART]
        return all(
            not 0 < word <= 1 + step or rank in lost for rank, word in enumerate(words)
        )

    def may_find(self, step: int) -> Callable[[], bool]:
        """Return what finds out whether `find_final` may return a gradient, or raise.

        On the root's node it reads memory only.
        """
        words = self._place(step), self._members, _STEP
        place, changes, newest = map(self.words.watch, words)
        all_left, lost = self.membership.all_left, self.membership.lost
        return lambda: (
            place() >> _WHOSE_BITS == step + 1
            or (all_left(changes()) and newest() == step)
            or (changes() > 0 and newest() > step and bool(lost()))
        )

    # Every rank

    def check_present(self) -> None:
        """Raise InvalidArgumentError if this rank has left."""
        self.membership.check_present("submit")

    def count_nonfinite(self) -> None:
        """Count a gradient of this rank that is not finite, and was not submitted."""
        self.counters.count_nonfinite(self._rank)

    def tally(self) -> Tally:
        """Return the gradients accepted and dropped so far, of all ranks."""
        return self.counters.tally()

    def awaited(self, step: int) -> str | None:
        """Return which ranks a step waits for; None if its gradient has arrived."""
        words = self.words.read_range(_STEP, self._members)
        made = [(word >> _WHOSE_BITS, word & NOBODY) for word in words[_HEAD:]]
        if words[_APPLIED] > step or any(each == step + 1 for each, _ in made):
            return None
        if words[_STEP] <= step:
            return f"a gradient, {self.source(step)}"
        # A rank with a gradient of a later step has none of this one.
        later = {rank for each, rank in made if each > step}
        return (
            f"one of {format_ranks(self.membership.present() - later)}, whose gradient "
            f"was admitted, to write it"
        )

    def source(self, step: int) -> str:
        """Return where the gradient of a step is, which has not arrived."""
        if self.global_step > step:
            return "admitted, to be written"
        return f"which may come from {format_ranks(self.membership.present())}"


def factors_of(lateness: Any, max_lag: float) -> Factors | None:
    """Return the factors of an option ``lateness``; None if all are 1."""
    return None if lateness is None else Factors(lateness, max_lag)


class Factors:
    """The factors of gradients by their lag, found before the first gradient comes.

    Ranks that compare its ``repr`` have the same factors, so each of them may apply one
    for the others.

    Args:
        lateness: Of `DropStaleGradientOptimizer`, not None.
        max_lag: Largest lag that is admitted.

    Raises:
        InvalidArgumentError: If ``lateness`` is something else, or returns anything but
            a number from 0 to 1.
    """

    def __init__(self, lateness: Any, max_lag: float) -> None:
        if lateness == "inverse":
            lateness = _inverse
        if not callable(lateness):
            raise InvalidArgumentError(
                f"lateness must be None, 'inverse' or a callable, got {lateness!r}"
            )
        lags = range(int(min(max(max_lag, 0), MOST)) + 1)
        self._factors = tuple(_checked(lateness(lag), lag) for lag in lags)

    def __repr__(self) -> str:
        """Show the first ones, and a number that depends on all."""
        shown = ", ".join(f"{factor:g}" for factor in self._factors[:_SHOWN])
        return f"factors {shown}, ... (hash {hash(self._factors)})"

    def __call__(self, lag: int) -> float:
        """Return the factor of a lag."""
        return self._factors[min(max(lag, 0), len(self._factors) - 1)]


def _inverse(lag: int) -> float:
    return 1 / (1 + lag)


def _checked(factor: Any, lag: int) -> float:
    if isinstance(factor, numbers.Real) and 0 <= float(factor) <= 1:
        return float(factor)
    raise InvalidArgumentError(
        f"lateness({lag}) must be a number from 0 to 1, got {factor!r}"
    )
