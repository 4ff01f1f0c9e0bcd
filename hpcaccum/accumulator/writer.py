"""One rank's gradients: admit each, write it to the storage, publish its record."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcaccum.accumulator.buffers import Buffers
from hpcaccum.accumulator.state import Record
from hpcaccum.deadline import Deadline
from hpcaccum.device import is_device
from hpcaccum.mpi import Attempt

if TYPE_CHECKING:
    from hpcaccum.accumulator.protocol import AdmissionProtocol, Admitted
    from hpcaccum.accumulator.receipts import Count, Receipt
    from hpcaccum.accumulator.row_storage import Storage

Array = np.ndarray[Any, Any]

# What is written, whether it is in its buffer already, and the record afterwards.
Job = tuple[Any, bool, Record]


class Writer:
    """Writes gradients of this rank to the round to which they are admitted.

    Args:
        protocol: Admits them.
        storage: Where they are written.
    """

    def __init__(self, protocol: AdmissionProtocol, storage: Storage) -> None:
        self._protocol, self._storage = protocol, storage
        self._buffers = Buffers(protocol, storage)
        self._lock = threading.Lock()
        self._begin()
        # For a gradient that cannot be written.
        self._withdrawal: Attempt | None = None
        self._given_up: Record | None = None

    def _begin(self) -> None:
        """Reset what an exception in the next gradient is recovered from."""
        self._protocol.forget_admission()
        # What is to be written, and this rank's record after it.
        self._job: Job | None = None
        # The parts that were added to a sum, which cannot be undone.
        self._added: list[None] = []
        self._stored = False
        self._counted: Count | None = None

    def submit(self, array: Any, local_step: int) -> Receipt:
        """Add a gradient to the open round unless it is stale.

        If it raises, nothing was added; except that a signal handler may raise when the
        gradient is in place already.
        """
        source = None
        if not (self._storage.sends and self._is_stale(array, local_step)):
            # What may fail comes before the admission.
            source = self._storage.prepare(array)
        receipt = self._try(array, source, local_step)
        if receipt is None:
            receipt = Deadline(None, "apply_grad").wait(
                lambda: self._try(array, source, local_step), lambda: _OTHER_THREAD
            )
        return receipt

    def _is_stale(self, array: Any, local_step: int) -> bool:
        """Return whether a gradient need not be prepared, as it will be dropped."""
        # Reading STATE costs less than a copy from a device, more than one of memory.
        return self._protocol.is_stale(local_step, ask=is_device(array))

    def _try(self, array: Any, source: Any, local_step: int) -> Receipt | None:
        """Submit; None if slots of other threads leave no buffer at the moment."""
        with self._lock:
            self._protocol.membership.check_present("apply")
            slot = self._buffers.slot_of(array)
            self._begin()
            try:
                admitted = self._admit(array, local_step, slot)
                return admitted and self._submit(admitted, array, source, slot)
            except BaseException:
                self._withdrawal = self._given_up = None
                # A signal handler may raise again, and no other rank can do this.
                try:
                    self._recover(local_step, slot)
                except BaseException:
                    self._recover(local_step, slot)
                    raise
                raise

    def _admit(self, array: Any, local_step: int, slot: int | None) -> Admitted | None:
        """Admit a gradient; None if there is no buffer for it at the moment.

        Raises:
            InvalidArgumentError: Also if its rows have no room in the open round.
        """
        only = None
        if not self._buffers.has_room(slot):
            only = self._buffers.joined()
            if only is None:
                return None
        elif overflow := self._buffers.overflow(array):
            only = 1 - overflow[0]
        admitted = self._protocol.admit(array, local_step, only)
        if admitted is None and (overflow := self._buffers.overflow(array)):
            raise overflow[1]
        return admitted

    def _submit(
        self, admitted: Admitted, array: Any, source: Any, slot: int | None
    ) -> Receipt:
        receipt, parity, shape = admitted
        if not receipt:
            self._count(self._protocol.counters.next(receipt))
            self._protocol.words.flush()
            return receipt
        if source is None:
            # It seemed stale, but the step was lowered since.
            source = self._storage.prepare(array)
        before, in_place = self._buffers.record(parity), False
        if before:
            buffer, number = before.buffer, before.number
        else:
            buffer, in_place = self._buffers.choose(array, slot, parity)
            number = 0
        done = Record(buffer, number + 1, 0, shape)
        writing = Record(buffer, number, 1, shape)
        self._protocol.mark_writing(parity, writing, before)
        self._job = (source, in_place, done)
        self._storage.write(parity, buffer, source, not number, in_place, self._added)
        self._stored = True
        # The caller's array is not needed any more, and not kept.
        self._job = (_NOTHING, in_place, done)
        self._count(self._protocol.counters.next(receipt))
        self._protocol.put_record(parity, done, writing)
        self._buffers.settle(parity, done, slot, receipt.global_step)
        return receipt

    def _count(self, count: Count) -> None:
        self._counted = count
        self._protocol.counters.post(count)

    # After an exception. All of this may be called twice.

    def _recover(self, local_step: int, slot: int | None) -> None:
        """Complete a gradient that is in place, or revoke its admission."""
        admitted = self._protocol.admitted(local_step)
        if admitted is None:
            if self._counted:
                self._protocol.counters.post(self._counted)
        elif self._job and (self._stored or self._added):
            self._complete(admitted, self._job, slot)
        else:
            self._give_up(*admitted[1:])
        self._protocol.words.flush()

    def _complete(self, admitted: Admitted, job: Job, slot: int | None) -> None:
        receipt, parity, _ = admitted
        source, in_place, done = job
        if not self._stored:
            first = done.number == 1
            self._storage.write(
                parity, done.buffer, source, first, in_place, self._added
            )
            self._stored = True
        self._count(self._counted or self._protocol.counters.next(receipt))
        if self._protocol.is_writing(parity):
            self._protocol.put_record(parity, done)
        self._buffers.settle(parity, done, slot, receipt.global_step)

    def _give_up(self, parity: int, shape: int) -> None:
        self._count(self._counted or self._protocol.counters.next_given_up())
        if self._given_up is None:
            before = self._buffers.record(parity)
            back = self._withdrawal = self._withdrawal or Attempt()
            if back.swapped or self._protocol.withdraw(parity, before, back):
                return
            # Too late. A take waits for this rank, so the record stays what it is.
            record = before or Record(0, 0, 0, shape)
            self._protocol.mark_writing(parity, record._replace(writing=1), before)
            self._protocol.words.flush()
            self._given_up = record._replace(given_up=1)
        if self._protocol.is_writing(parity):
            self._protocol.put_record(parity, self._given_up)

    def slot(self, shape: tuple[int, ...], deadline: Deadline) -> Array:
        """Return a buffer that no round holds; wait until there is one."""
        return deadline.wait(lambda: self._lend(shape), self._buffers.missing)

    def _lend(self, shape: tuple[int, ...]) -> Array | None:
        with self._lock:
            return self._buffers.lend(shape)

    def note_finished(self, step: int) -> None:
        """Note that the takes of all rounds of steps below ``step`` have returned."""
        with self._lock:
            self._buffers.note_finished(step)

    def leave(self) -> None:
        """Promise that this rank contributes no more gradients."""
        with self._lock:
            self._protocol.membership.leave()

    def free(self) -> None:
        """Drop the references to the memory of slots and of the last gradient."""
        self._buffers.free()
        self._job = None


_NOTHING = np.empty(0)
_OTHER_THREAD = "another thread of this rank to apply the slot that it holds"
