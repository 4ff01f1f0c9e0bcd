"""One rank's gradients: admit each, write it to the storage, publish its record."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcaccum.accumulator.buffers import Buffers
from hpcaccum.accumulator.one_thread import OneThread
from hpcaccum.accumulator.recovery import Recovery
from hpcaccum.accumulator.state import Record
from hpcaccum.deadline import Deadline
from hpcaccum.device import is_device
from hpcaccum.mpi import Attempt

if TYPE_CHECKING:
    from hpcaccum.accumulator.protocol import AdmissionProtocol, Admitted
    from hpcaccum.accumulator.receipts import Count, Receipt
    from hpcaccum.accumulator.remote_admission import Answer, RemoteAdmission
    from hpcaccum.accumulator.row_storage import Storage

Array = np.ndarray[Any, Any]

# What is written, whether it is in its buffer already, and the record afterwards.
Job = tuple[Any, bool, Record]


class Writer:
    """Writes gradients of this rank to the round to which they are admitted.

    Args:
        protocol: Admits them.
        storage: Where they are written.
        remote: Admits them if this rank is on another node than the host; None if no
            agent does.
        what: Name for messages.
    """

    def __init__(
        self,
        protocol: AdmissionProtocol,
        storage: Storage,
        remote: RemoteAdmission | None,
        what: str,
    ) -> None:
        self._protocol, self._storage = protocol, storage
        self._remote = None if protocol.words.near else remote
        self._buffers = Buffers(protocol, storage)
        self._turn, self._call = OneThread(what), f"{what}: apply_grad"
        self._recovery = Recovery(self._complete_or_revoke, self._remote, self._call)
        self._begin()

    def _begin(self) -> None:
        """Reset what an exception in the next gradient is recovered from."""
        self._protocol.forget_admission()
        if self._remote is not None:
            self._remote.forget()
        # What is to be written, and this rank's record after it.
        self._job: Job | None = None
        # The parts that were added to a sum, which cannot be undone.
        self._added: list[None] = []
        self._stored = False
        self._counted: Count | None = None
        # For a gradient that cannot be written.
        self._withdrawal: Attempt | None = None
        self._given_up: Record | None = None

    def submit(self, array: Any, local_step: int) -> Receipt:
        """Add a gradient to the open round unless it is stale.

        If it raises, nothing was added; except that a signal handler may raise when the
        gradient is in place already, and that an agent may still admit it.

        Raises:
            WaitTimeoutError: If an agent does not answer in time; also if it has not
                answered to the gradient before, and nothing was done with this one.
        """
        source = None
        if not (self._storage.sends and self._is_stale(array, local_step)):
            # What may fail comes before the admission.
            source = self._storage.prepare(array)
        receipt = self._try(array, source, local_step)
        if receipt is None:
            receipt = Deadline(None, self._call).wait(
                lambda: self._try(array, source, local_step), lambda: _OTHER_THREAD
            )
        return receipt

    def _is_stale(self, array: Any, local_step: int) -> bool:
        """Return whether a gradient need not be prepared, as it will be dropped."""
        # Reading STATE costs less than a copy from a device, more than one of memory.
        return self._protocol.is_stale(local_step, ask=is_device(array))

    def _try(self, array: Any, source: Any, local_step: int) -> Receipt | None:
        """Submit; None if slots of other threads leave no buffer at the moment."""
        return self._turn.run(
            "apply_grad", lambda: self._try_alone(array, source, local_step)
        )

    def _try_alone(self, array: Any, source: Any, local_step: int) -> Receipt | None:
        self._protocol.membership.check_present("apply")
        self._recovery.finish()
        slot = self._buffers.slot_of(array)
        self._begin()

        def submit() -> Receipt | None:
            if self._fits_remote(array):
                return self._submit_remotely(array, source, local_step, slot)
            admitted = self._admit(array, local_step, slot)
            return admitted and self._submit(admitted, array, source, slot)

        return self._recovery.run(submit, local_step, slot)

    def _admit(self, array: Any, local_step: int, slot: int | None) -> Admitted | None:
        """Admit a gradient; None if there is no buffer for it at the moment.

        Raises:
            InvalidArgumentError: Also if its rows have no room in the open round.
        """
        possible, only = self._possible(array, slot)
        if not possible:
            return None
        admitted = self._protocol.admit(array, local_step, only)
        if admitted is None and (overflow := self._buffers.overflow(array)):
            raise overflow[1]
        return admitted

    def _possible(self, array: Any, slot: int | None) -> tuple[bool, int | None]:
        """Return whether a gradient has a buffer, and if only for one parity, which."""
        if not self._buffers.has_room(slot):
            only = self._buffers.joined()
            return only is not None, only
        overflow = self._buffers.overflow(array)
        return True, 1 - overflow[0] if overflow else None

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
        before = self._buffers.record(parity)
        done, writing, in_place = self._records(before, array, slot, parity, shape)
        self._protocol.mark_writing(parity, writing, before)
        self._job = (source, in_place, done)
        self._write(receipt, parity, writing, slot)
        return receipt

    def _records(
        self,
        before: Record | None,
        array: Any,
        slot: int | None,
        parity: int,
        shape: int,
    ) -> tuple[Record, Record, bool]:
        """Return this rank's record after a gradient is written, and before that.

        Also returns whether it is in its buffer already.
        """
        in_place = False
        if before:
            buffer, number = before.buffer, before.number
        else:
            buffer, in_place = self._buffers.choose(array, slot, parity)
            number = 0
        done = Record(buffer, number + 1, 0, shape)
        return done, Record(buffer, number, 1, shape), in_place

    def _write(
        self, receipt: Receipt, parity: int, writing: Record, slot: int | None
    ) -> None:
        """Write the gradient of `_job`, count it, and publish its record."""
        assert self._job is not None
        source, in_place, done = self._job
        first = not writing.number
        self._storage.write(parity, done.buffer, source, first, in_place, self._added)
        self._stored = True
        # The caller's array is not needed any more, and not kept.
        self._job = (_NOTHING, in_place, done)
        self._count(self._protocol.counters.next(receipt))
        self._protocol.put_record(parity, done, writing)
        self._buffers.settle(parity, done, slot, receipt.global_step)

    # By the agent of the host's node

    def _fits_remote(self, array: Any) -> bool:
        """Whether the agent can admit a gradient; others need an error of this rank."""
        return (
            self._remote is not None
            and self._protocol.shapes.number(array, 0) is not None
        )

    def _submit_remotely(
        self, array: Any, source: Any, local_step: int, slot: int | None
    ) -> Receipt | None:
        assert self._remote is not None
        possible, only = self._possible(array, slot)
        if not possible:
            return None
        fresh = self._fresh(array, slot, 0), self._fresh(array, slot, 1)
        contents = None
        if slot is not None and self._buffers.is_in(array, slot):
            contents = self._remote.short(slot)
        answer = self._remote.admit(local_step, only, fresh, contents)
        if answer.accepted is None:
            # Rare: there is an error to raise, or the round is another one by now.
            admitted = self._admit(array, local_step, slot)
            return admitted and self._submit(admitted, array, source, slot)
        receipt, parity = answer.receipt(local_step), answer.parity
        if self._note(answer, local_step, slot):
            return receipt
        before, writing = Record.of(answer.before), Record.of(answer.record)
        done, _, in_place = self._records(
            before if before.number else None, array, slot, parity, 0
        )
        self._job = (source, in_place, done)
        self._write(receipt, parity, writing, slot)
        return receipt

    def _fresh(self, array: Any, slot: int | None, parity: int) -> int:
        """Return the word of the first record in a round, 0 if it has no buffer."""
        if self._buffers.is_in(array, slot):
            assert slot is not None
            return Record(slot, 1, 0, 0).word()
        free = self._buffers.free_for(slot, parity)
        return Record(free[0], 0, 1, 0).word() if free else 0

    def _note(self, answer: Answer, local_step: int, slot: int | None) -> bool:
        """Note what an agent has done; return whether nothing is left to do."""
        before, receipt = Record.of(answer.before), answer.receipt(local_step)
        if answer.accepted:
            self._buffers.note(answer.parity, before if answer.before else None)
        if answer.accepted and not answer.complete:
            return False
        self._counted = self._counted or self._protocol.counters.next(receipt)
        self._protocol.counters.note(self._counted)
        if answer.accepted:
            done = Record.of(answer.record)
            self._buffers.settle(answer.parity, done, slot, answer.step)
        return True

    def _count(self, count: Count) -> None:
        self._counted = count
        self._protocol.counters.post(count)

    # After an exception. All of this may be called twice.

    def _complete_or_revoke(self, local_step: int, slot: int | None) -> None:
        """Complete a gradient that is in place, or revoke its admission."""
        # Also of a withdrawal, when this is called again.
        self._protocol.words.settle()
        answer = self._remote and self._remote.settled()
        if answer and answer.accepted is not None:
            if self._note(answer, local_step, slot):
                return
            admitted: Admitted | None = answer.receipt(local_step), answer.parity, 0
        else:
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

        def lend() -> Array | None:
            # The gradient before may be in a slot.
            self._recovery.finish(deadline)
            return self._buffers.lend(shape)

        return deadline.wait(
            lambda: self._turn.run("slot", lend, deadline), self._buffers.missing
        )

    def finish(self, deadline: Deadline | None = None) -> None:
        """Complete a gradient whose `submit` has raised, or give it up.

        If an agent did not answer in time, this was not possible until now.

        Raises:
            WaitTimeoutError: If it does not answer this time, either.
        """
        if self._recovery.pending:
            finish = functools.partial(self._recovery.finish, deadline)
            self._turn.run("apply_grad", finish, deadline)

    def note_finished(self, step: int) -> None:
        """Note that the takes of all rounds of steps below ``step`` have returned."""
        self._turn.run("slot", lambda: self._buffers.note_finished(step))

    def leave(self) -> None:
        """Promise that this rank contributes no more gradients."""
        self.finish()
        self._turn.run("leave", self._protocol.membership.leave)

    def free(self) -> None:
        """Drop the references to the memory of slots and of the last gradient."""
        self._buffers.free()
        self._job = None


_NOTHING = np.empty(0)
_OTHER_THREAD = "another thread of this rank to apply the slot that it holds"
