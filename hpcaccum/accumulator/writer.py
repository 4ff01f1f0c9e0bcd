"""One rank's side of an accumulator: its two buffers, and gradients on their way."""

from __future__ import annotations

import math
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hpcaccum.accumulator.state import Record
from hpcaccum.deadline import Deadline
from hpcaccum.device import is_device
from hpcaccum.errors import InvalidArgumentError
from hpcaccum.mpi import Attempt
from hpcaccum.overlap import overlap, same_elements

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpcaccum.accumulator.protocol import Admitted, Rounds
    from hpcaccum.accumulator.receipts import Counts, Receipt
    from hpcaccum.accumulator.storage import Slots, Sums

Array = np.ndarray[Any, Any]


class Lent(NamedTuple):
    """A buffer that a thread has got from `Writer.slot` and not applied yet."""

    array: Array
    thread: threading.Thread


# What is written, whether it is there already, and this rank's record afterwards.
Job = tuple[Array, bool, Record]


class Writer:
    """Brings gradients of this rank to the round they are admitted to.

    A buffer is not tied to a parity: while one is held by a round that is being
    reduced, the other serves the open round, and a gradient computed in place is
    admitted to whichever round is open by then.

    Args:
        rounds: The protocol.
        storage: Where the gradients go.
        rank: This rank.
    """

    def __init__(self, rounds: Rounds, storage: Slots | Sums, rank: int) -> None:
        self._rounds, self._storage, self._rank = rounds, storage, rank
        self._lock = threading.Lock()
        # What this rank has in the round of each parity; None if surely nothing.
        self._mine: list[Record | None] = [None, None]
        self._last_parity = 0
        # By buffer: who has it now, and the memory of all that were ever handed out.
        self._lent: dict[int, Lent] = {}
        self._slots: dict[int, Array] = {}
        self._begin()
        # For a gradient that cannot be written.
        self._withdrawal: Attempt | None = None
        self._given_up: Record | None = None

    def _begin(self) -> None:
        """Forget the gradient before; these say where an exception found the next."""
        self._rounds.admission.reset()
        # What is to be written, and this rank's record after it.
        self._job: Job | None = None
        # What was added to a sum already, and cannot be taken back.
        self._added: list[None] = []
        self._stored = False
        self._counts: Counts | None = None

    def submit(
        self, array: Array, local_step: int, fit: Callable[[int], int]
    ) -> Receipt:
        """Add a gradient to the open round unless it is stale.

        If it raises, nothing was added; except that a signal handler may raise when the
        gradient is in place already.
        """
        source = None
        if not (self._storage.sends and self._is_stale(array, local_step)):
            # What may fail comes before the admission.
            source = self._storage.prepare(array)
        receipt = self._try(array, source, local_step, fit)
        if receipt is None:
            deadline = Deadline(None, "apply_grad")
            receipt = deadline.wait(
                lambda: self._try(array, source, local_step, fit), lambda: _OTHER_THREAD
            )
        return receipt

    def _is_stale(self, array: Array, local_step: int) -> bool:
        """Whether a gradient need not be prepared, as it will be dropped."""
        # To ask the host costs less than a copy from a device, more than one of memory.
        return self._rounds.is_stale(local_step, ask=is_device(array))

    def _try(
        self,
        array: Array,
        source: Array | None,
        local_step: int,
        fit: Callable[[int], int],
    ) -> Receipt | None:
        """Submit; None if other threads' slots leave no buffer at the moment."""
        with self._lock:
            if self._rounds.membership.has_left:
                raise InvalidArgumentError(
                    f"rank {self._rank} has left and can apply no more gradients"
                )
            slot, only = self._slot_of(array) if self._slots else None, None
            if len(self._lent) > (slot is not None) and not self._has_room(slot):
                only = self._joined()
                if only is None:
                    return None
            self._begin()
            try:
                admitted = self._rounds.admit(local_step, fit, only)
                return admitted and self._submit(admitted, array, source, slot)
            except BaseException:
                self._withdrawal = self._given_up = None
                # A signal handler may raise here too, and nobody else can do this.
                try:
                    self._recover(local_step, slot)
                except BaseException:
                    self._recover(local_step, slot)
                    raise
                raise

    def _submit(
        self, admitted: Admitted, array: Array, source: Array | None, slot: int | None
    ) -> Receipt:
        receipt, parity, shape = admitted
        if not receipt:
            self._count(self._rounds.ledger.next(receipt))
            self._rounds.words.flush()
            return receipt
        if source is None:
            # The step was lowered since.
            source = self._storage.prepare(array)
        before, there = self._known(parity), False
        if before:
            buffer, number = before.buffer, before.number
        else:
            buffer, there = self._choose(array, slot, parity)
            number = 0
        done = Record(buffer, number + 1, 0, shape)
        self._rounds.writing(parity, Record(buffer, number, 1, shape))
        self._job = (source, there, done)
        self._storage.write(parity, buffer, source, not number, there, self._added)
        self._stored = True
        # The caller's array is not needed any more, and not kept.
        self._job = (_NOTHING, there, done)
        self._count(self._rounds.ledger.next(receipt))
        self._rounds.put_record(parity, done)
        self._settle(parity, done, slot)
        return receipt

    def _count(self, counts: Counts) -> None:
        self._counts = counts
        self._rounds.ledger.post(counts)

    def _settle(self, parity: int, done: Record, slot: int | None) -> None:
        """Remember what this rank has; take the slots back that were this thread's."""
        self._mine[parity] = done
        if self._lent:
            for index in self._lent.keys() - self._of_others(slot):
                self._take_back(index)

    # After an exception. All of this may be done twice.

    def _recover(self, local_step: int, slot: int | None) -> None:
        """Complete a gradient that is in place, or take its admission back."""
        admitted = self._rounds.admitted(local_step)
        if admitted is None:
            self._rounds.ledger.post(self._counts or ())
        elif self._job and (self._stored or self._added):
            self._complete(admitted, self._job, slot)
        else:
            self._give_up(*admitted[1:])
        self._rounds.words.flush()

    def _complete(self, admitted: Admitted, job: Job, slot: int | None) -> None:
        receipt, parity, _ = admitted
        source, there, done = job
        if not self._stored:
            first = done.number == 1
            self._storage.write(parity, done.buffer, source, first, there, self._added)
            self._stored = True
        self._count(self._counts or self._rounds.ledger.next(receipt))
        if self._rounds.writes(parity):
            self._rounds.put_record(parity, done)
        self._settle(parity, done, slot)

    def _give_up(self, parity: int, shape: int) -> None:
        self._count(self._counts or self._rounds.ledger.next_given_up())
        if self._given_up is None:
            before = self._known(parity)
            back = self._withdrawal = self._withdrawal or Attempt()
            if back.swapped or self._rounds.withdraw(parity, before, back):
                return
            # Too late. A take waits for this rank, so the record stays what it is.
            record = before or Record(0, 0, 0, shape)
            self._rounds.writing(parity, record._replace(writing=1))
            self._rounds.words.flush()
            self._given_up = record._replace(given_up=1)
        if self._rounds.writes(parity):
            self._rounds.put_record(parity, self._given_up)

    # Buffers

    def _known(self, parity: int) -> Record | None:
        """Return what this rank has in the round that is open now, of this parity."""
        if parity != self._last_parity:
            # The other parity was open in between, so this one was cleared.
            self._mine[parity], self._last_parity = None, parity
        elif self._mine[parity] and not self._rounds.holds(parity, self._rank):
            # Both parities may have changed places twice without this rank looking.
            self._mine[parity] = None
        return self._mine[parity]

    def _choose(self, array: Array, slot: int | None, parity: int) -> tuple[int, bool]:
        """Return a buffer that no round holds; whether the gradient lies in it."""
        if slot is not None and same_elements(array, self._lent[slot].array):
            return slot, True
        other = self._mine[1 - parity]
        free = [1 - other.buffer] if other else [0, 1]
        if self._lent:
            others = self._of_others(slot)
            free = [buffer for buffer in free if buffer not in others]
            # This thread's own slot may be lost, but it is the caller's until now.
            free.sort(key=self._lent.__contains__)
            self._take_back(free[0])
        return free[0], False

    def _take_back(self, index: int) -> None:
        """End the loan of a slot: NumPy refuses to write to the array from now on."""
        if index in self._lent:
            self._lent[index].array.flags.writeable = False
            del self._lent[index]

    def _slot_of(self, array: Array) -> int | None:
        """Return the slot that an array lies in; None if it lies elsewhere.

        Raises:
            InvalidArgumentError: If the slot is no longer the caller's.
        """
        if array.base is None or is_device(array):
            return None
        for index, lent in self._lent.items():
            if array is lent.array:
                return index
        for index, memory in self._slots.items():
            if overlap(array, memory):
                if index in self._lent:
                    return index
                raise InvalidArgumentError(
                    "the gradient lies in a slot of this rank that is no longer the "
                    "caller's, because a gradient was applied since: call slot() again "
                    "for each gradient"
                )
        return None

    def _of_others(self, slot: int | None = None) -> set[int]:
        """Return the slots that other threads hold; none of a thread that has ended."""
        if self._lent.keys() <= {slot}:
            return set()
        me = threading.current_thread()
        return {
            index
            for index, lent in self._lent.items()
            if index != slot and lent.thread is not me and lent.thread.is_alive()
        }

    def _held(self) -> set[int]:
        """Return the buffers that rounds hold."""
        for parity, mine in enumerate(self._mine):
            if mine and not self._rounds.holds(parity, self._rank):
                self._mine[parity] = None
        return {mine.buffer for mine in self._mine if mine}

    def _has_room(self, slot: int | None) -> bool:
        """Whether a gradient has a buffer, whichever round it is admitted to."""
        others = self._of_others(slot)
        return not others or bool({0, 1} - others - self._held())

    def _joined(self) -> int | None:
        """Return the open parity, if this rank has a gradient there to add to."""
        parity = self._rounds.state().parity
        mine = self._mine[parity]
        held = mine is not None and self._rounds.holds(parity, self._rank)
        return parity if held else None

    def slot(self, shape: tuple[int, ...], deadline: Deadline) -> Array:
        """Return a buffer that no round holds; wait until there is one."""
        return deadline.wait(lambda: self._lend(shape), self._missing_slot)

    def _missing_slot(self) -> str:
        if self._of_others():
            return _OTHER_THREAD
        return "the take that is reducing both buffers of this rank"

    def _lend(self, shape: tuple[int, ...]) -> Array | None:
        with self._lock:
            free = {0, 1} - self._held() - self._of_others()
            if not free:
                return None
            # Asked for twice without an apply: the same one.
            index = min(free, key=lambda each: (each not in self._lent, each))
            me, lent = threading.current_thread(), self._lent.get(index)
            if lent and lent.thread is me and lent.array.shape == shape:
                return lent.array
            self._take_back(index)
            memory = self._slots[index] = self._storage.buffer(index)
            array = memory[: math.prod(shape)].reshape(shape)
            self._lent[index] = Lent(array, me)
            return array

    def free(self) -> None:
        """Let go of the memory that was lent."""
        self._lent.clear()
        self._slots.clear()
        self._job = None

    def leave(self) -> None:
        """Promise that this rank brings no more gradients."""
        with self._lock:
            self._rounds.membership.leave()


_NOTHING = np.empty(0)
_OTHER_THREAD = "another thread of this rank to apply the slot that it holds"
