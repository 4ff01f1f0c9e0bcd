"""One rank's gradients: admit each, write it to the storage, publish its record."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcaccum.accumulator.buffers import OTHER_THREAD, RankBuffers
from hpcaccum.accumulator.one_thread import OneThread
from hpcaccum.accumulator.recovery import Recovery
from hpcaccum.accumulator.state import Record
from hpcaccum.deadline import Deadline
from hpcaccum.device import is_device
from hpcaccum.mpi import Attempt

if TYPE_CHECKING:
    from hpcaccum.accumulator.protocol import AdmissionProtocol, Admitted
    from hpcaccum.accumulator.receipts import Count, Receipt
    from hpcaccum.accumulator.remote_admission import AdmissionAnswer, RemoteAdmission
    from hpcaccum.accumulator.row_storage import Storage
    from hpcaccum.dtypes import Array

_NOTHING = np.empty(0)
# What is written, whether it is in its buffer already, and the record afterwards.
Job = tuple[Any, bool, Record]


class Writer:
    """Has gradients of this rank admitted, and writes them to their round.

    Args:
        protocol: Admits them.
        storage: Where they are written.
        remote: Admits them if this rank cannot do so alone; None if no agent does.
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
        self._remote = None if protocol.words.unaided else remote
        # The host has its agent look for those of other ranks, which often come soon.
        self._wake_agent = remote.wake if remote is not None else lambda: None
        self._buffers = RankBuffers(protocol, storage)
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

        def attempt() -> Receipt | None:
            return self._turn.run(
                "apply_grad", lambda: self._try(array, source, local_step)
            )

        receipt = attempt()
        if receipt is None:
            deadline = Deadline(None, self._call)
            receipt = deadline.wait(attempt, lambda: OTHER_THREAD)
        return receipt

    def _is_stale(self, array: Any, local_step: int) -> bool:
        """Return whether a gradient need not be prepared, as it will be dropped."""
        # Reading STATE costs less than a copy from a device, more than one of memory.
        return self._protocol.is_stale(local_step, ask=is_device(array))

    def _try(self, array: Any, source: Any, local_step: int) -> Receipt | None:
        """Submit; None if slots of other threads leave no buffer at the moment."""
        self._protocol.membership.check_present("apply")
        self._recovery.finish()
        slot = self._buffers.slot_of(array)
        self._begin()
        submit = self._submit_remotely if self._fits_remote(array) else self._submit
        return self._recovery.run(
            functools.partial(submit, array, source, local_step, slot), local_step, slot
        )

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
        self, array: Any, source: Any, local_step: int, slot: int | None
    ) -> Receipt | None:
        self._wake_agent()
        admitted = self._admit(array, local_step, slot)
        if admitted is None:
            return None
        receipt, parity, shape = admitted
        if not receipt:
            self._count(self._protocol.counters.next(receipt))
            self._protocol.words.flush()
            return receipt
        if source is None:
            # It seemed stale, but the step was lowered since.
            source = self._storage.prepare(array)
        before = self._buffers.record(parity)
        if before:
            writing, in_place = Record(before.buffer, before.number, 1, shape), False
        else:
            buffer, in_place = self._buffers.choose(array, slot, parity)
            writing = Record(buffer, 0, 1, shape)
        self._protocol.mark_writing(parity, writing, before)
        self._job = source, in_place, writing.written()
        self._write(receipt, parity, slot, writing)
        return receipt

    def _write(
        self, receipt: Receipt, parity: int, slot: int | None, writing: Record | None
    ) -> None:
        """Write the gradient of `_job`, count it, and publish its record.

        It does what is left of this if an exception has ended the first call.

        Args:
            receipt: Of the gradient.
            parity: Of its round.
            slot: As for `RankBuffers.choose`.
            writing: What this rank has published, if that is known.
        """
        assert self._job is not None
        source, in_place, done = self._job
        if not self._stored:
            first = done.number == 1
            self._storage.write(
                parity, done.buffer, source, first, in_place, self._added
            )
            self._stored = True
            # The caller's array is not needed any more, and not kept.
            self._job = (_NOTHING, in_place, done)
        self._count(self._counted or self._protocol.counters.next(receipt))
        if writing or self._protocol.is_writing(parity):
            self._protocol.put_record(parity, done, writing)
        self._buffers.settle(parity, done, slot, receipt.global_step)

    # By the agent of the host's node, if the words are out of this rank's reach

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
        placed = slot if self._buffers.is_in(array, slot) else None
        fresh = self._fresh(placed, slot, 0), self._fresh(placed, slot, 1)
        answer = self._remote.admit(local_step, only, fresh, placed)
        if answer.accepted is None:
            # Rare: there is an error to raise, or the round is another one by now.
            return self._submit(array, source, local_step, slot)
        receipt, writing = answer.receipt(local_step), Record.of(answer.record)
        if not self._note(answer, local_step, slot):
            self._buffers.take_back(writing.buffer)
            self._job = source, False, writing.written()
            self._write(receipt, answer.parity, slot, writing)
        return receipt

    def _fresh(self, placed: int | None, slot: int | None, parity: int) -> int:
        """Return the word of the first record in a round, 0 if it has no buffer."""
        if placed is not None:
            return Record(placed, 1, 0, 0).word()
        free = self._buffers.free_for(slot, parity)
        return Record(free[0], 0, 1, 0).word() if free else 0

    def _note(self, answer: AdmissionAnswer, local_step: int, slot: int | None) -> bool:
        """Note what an agent has done; return whether nothing is left to do."""
        if answer.accepted:
            self._buffers.note(answer.parity, answer.held)
            if not answer.complete:
                return False
        counters = self._protocol.counters
        self._counted = self._counted or counters.next(answer.receipt(local_step))
        counters.note(self._counted)
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
        elif self._stored or self._added:
            receipt, parity, _ = admitted
            self._write(receipt, parity, slot, None)
        else:
            self._give_up(*admitted[1:])
        self._protocol.words.flush()

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
