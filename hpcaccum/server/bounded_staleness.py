"""Gradients that are updates by themselves, applied in the order of admission.

Where each gradient is an update (DropStale, AGN), admission itself advances the step:
the order of admission is the order of application, and the lag of a second worker's
gradient already counts the first one's, admitted but not yet applied. So the check and
the update are one unit.
"""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcaccum.accumulator import Counters, Membership, Receipt, WordLayout
from hpcaccum.deadline import Deadline
from hpcaccum.device import Pinned
from hpcaccum.errors import EverybodyLeftError, format_ranks
from hpcaccum.mpi import AtomicWords, Attempt, Region

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hpcaccum.accumulator import Counts, Tally
    from hpcaccum.mpi import Group

Array = np.ndarray[Any, Any]

# Every swap of _STEP must not slow down those who read other words.
_FIXED = WordLayout()
_STEP = _FIXED.take(own_lines=True)
_APPLIED = _FIXED.take()
# One place a rank; then the words of `Membership`.
_HEAD = _FIXED.count


class BoundedStalenessInbox:
    """A queue of gradients on the host, one place a rank. Collective.

    A rank submits, then waits until its gradient was applied; only then may it write
    into its slot again. The host takes the gradients one after the other.

    If `submit` fails after the gradient was admitted, it is given up: its update comes
    all the same, as one of zeros.

    Args:
        group: The ranks.
        host: The rank that applies.
        size, dtype: Of a gradient, a flat vector.
        max_lag: A gradient is admitted if it is at most this many steps late; infinity
            admits all.
        workers: How many ranks submit, and may leave; if not all, not the host.
    """

    adds = False

    def __init__(
        self,
        group: Group,
        host: int,
        size: int,
        dtype: Any,
        *,
        max_lag: float = math.inf,
        workers: int | None = None,
    ) -> None:
        self._group, self._size, self._dtype = group, size, np.dtype(dtype)
        self._max_lag, n = max_lag, group.size
        layout = WordLayout(after=_FIXED)
        layout.take(n)
        # The first of these words follows the others, for one read of all.
        self._members = layout.take(Membership.words(n))
        ledger = layout.take(Counters.words(n))
        with contextlib.ExitStack() as undo:
            self.words = AtomicWords(group, host, layout.count)
            undo.callback(self.words.free)
            nbytes = size * self._dtype.itemsize
            self._region = Region(group, host, nbytes, spread=True)
            undo.pop_all()
        self.membership = Membership(
            self.words, self._members, group.rank, n, n if workers is None else workers
        )
        self.ledger = Counters(self.words, ledger, group.rank, n)
        # A rank may use its slot after `free`, which a window would not survive.
        mapped = self._region.mapped
        self._slot = self._place(group.rank) if mapped else np.zeros(size, self._dtype)
        self._pinned: Pinned | None = None
        # The step that this rank's last update makes.
        self._submitted = 0
        # What an exception in the midst of a call is recovered from.
        self._admission = Attempt()
        self._counts: Counts | None = None

    def _place(self, rank: int) -> Array:
        return self._region.view(rank, 0, self._size, self._dtype)

    @property
    def step(self) -> int:
        """Gradients admitted so far."""
        return self.words.read(_STEP)

    @property
    def window_bytes(self) -> int:
        """Memory of this rank that holds gradients."""
        return self._region.nbytes_here

    def start(self, step: int) -> None:
        """Set the step of the first update; the root only, before any submission."""
        self.words.write(_APPLIED, step)
        self.words.write(_STEP, step)

    def slot(self) -> Array:
        """Return where this rank's next gradient is to be written; always the same.

        Waits until the last one was applied, for a rank that gave up waiting for it.
        """
        Deadline(None, "slot").wait(
            lambda: self.words.read(_APPLIED) >= self._submitted or None,
            lambda: (
                f"update {self._submitted}, this rank's last, by rank {self.words.root}"
            ),
        )
        return self._slot

    def pin(self) -> None:
        """Let the device reach this rank's slot by itself."""
        if self._pinned is None:
            self._pinned = Pinned(self._slot)

    def submit(self, local_step: int) -> Receipt:
        """Submit the gradient that lies in `slot`, unless it is too late.

        If it is accepted, its update makes step ``receipt.global_step + 1``.
        """
        self.membership.check_present("submit")
        self._admission.reset()
        self._counts = None
        try:
            return self._submit(local_step)
        except BaseException:
            # A signal handler may raise here too, and nobody else can do this.
            try:
                self._recover(local_step)
            except BaseException:
                self._recover(local_step)
                raise
            raise

    def _submit(self, local_step: int) -> Receipt:
        receipt = self._admit(local_step)
        if receipt:
            if not self._region.mapped:
                self._region.put(self._group.rank, 0, self._slot)
            # Update k makes step k + 1; 0 is the place of a rank that submitted none.
            self._submitted = receipt.global_step + 1
            self.words.store(_HEAD + self._group.rank, [self._submitted])
        self._count(self.ledger.next(receipt))
        self.words.flush()
        return receipt

    def _count(self, counts: Counts) -> None:
        self._counts = counts
        self.ledger.post(counts)

    def _recover(self, local_step: int) -> None:
        """Give up what was admitted, unless the host can see it; may be done twice."""
        self.words.settle()
        place, admission = _HEAD + self._group.rank, self._admission
        if admission.swapped:
            step = int(admission.compare[0])
            self._submitted = step + 1
            if self.words.read(place) == self._submitted:
                accepted = self.ledger.next(Receipt(True, local_step, step))
                self._count(self._counts or accepted)
            else:
                self._count(self._counts or self.ledger.next_given_up())
                self.words.store(place, [-self._submitted])
        else:
            self.ledger.post(self._counts or ())
        self.words.flush()

    def _admit(self, local_step: int) -> Receipt:
        step = self.words.read(_STEP)
        while step - local_step <= self._max_lag:
            found = self.words.compare_and_swap(_STEP, step, step + 1, self._admission)
            if found == step:
                return Receipt(True, local_step, step)
            step = found
        return Receipt(False, local_step, step)

    def missed(self, receipt: Receipt) -> int:
        """Return the least step whose gradient would have been admitted instead.

        If none would (negative ``max_lag``), there is nothing to wait for.
        """
        return receipt.global_step - int(max(self._max_lag, 0))

    @contextlib.contextmanager
    def next(self, step: int, deadline: Deadline) -> Iterator[Array]:
        """Give the body the gradient admitted at ``step``; the host only.

        It is a vector of zeros if the gradient was given up.

        Raises:
            WaitTimeoutError: If it does not come in time.
            EverybodyLeftError: If all ranks have left and none is there.
        """
        gradient = deadline.wait(
            lambda: self._find(step), lambda: f"update {step + 1}, {self._whose(step)}"
        )
        self._region.sync()
        # The number of the update stays in its place: it is never looked for again.
        yield gradient
        self.words.write(_APPLIED, step + 1)

    def _find(self, step: int) -> Array | None:
        words = self.words.read_range(_STEP, self._members + 1)
        places = words[_HEAD : self._members]
        if step + 1 in places:
            return self._place(places.index(step + 1))
        if -(step + 1) in places:
            return np.zeros(self._size, self._dtype)
        everybody = self.membership.all_left(words[self._members])
        if everybody and self.step == step:
            raise EverybodyLeftError(f"all {self.membership.workers} ranks have left")
        return None

    def awaited(self, step: int) -> str | None:
        """Return whose gradient of a step is not there; None if it is."""
        words = self.words.read_range(_STEP, self._members)
        newest = [abs(word) for word in words[_HEAD:]]
        if step + 1 in newest or words[_APPLIED] > step:
            return None
        if words[_STEP] <= step:
            return f"a gradient, {self._whose(step)}"
        # One that was admitted and has not written has no other that waits.
        idle = {rank for rank, last in enumerate(newest) if last <= step}
        return (
            f"one of {format_ranks(idle - set(self.left()))}, whose gradient was "
            f"admitted, to write it"
        )

    def _whose(self, step: int) -> str:
        if self.step > step:
            return "admitted, to be written"
        return f"which may come from {format_ranks(self.membership.present())}"

    def tally(self) -> Tally:
        """Return what was accepted and dropped so far, of all ranks."""
        return self.ledger.tally()

    def leave(self) -> None:
        """Promise that this rank submits no more; once is enough."""
        self.membership.leave()

    def left(self) -> list[int]:
        """Return the ranks that have left."""
        return self.membership.left()

    def free(self) -> None:
        """Free the memory. Collective."""
        if self._pinned is not None:
            self._pinned.free()
        self._slot = np.empty(0, self._dtype)
        self._region.free()
        self.words.free()
