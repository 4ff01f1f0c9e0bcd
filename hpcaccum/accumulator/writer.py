"""One rank's gradients: admit each, write it to the storage, publish its record."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from hpcaccum.accumulator.buffers import OTHER_THREAD, RankBuffers
from hpcaccum.accumulator.one_thread import OneThread
from hpcaccum.accumulator.state import Record
from hpcaccum.deadline import Deadline
from hpcaccum.device import is_device
from hpcaccum.errors import InvalidArgumentError, WaitTimeoutError

if TYPE_CHECKING:
    from hpcaccum.accumulator.protocol import AdmissionProtocol, Admitted
    from hpcaccum.accumulator.receipts import Receipt
    from hpcaccum.accumulator.remote_admission import (
        AdmissionAnswer,
        Fresh,
        RemoteAdmission,
    )
    from hpcaccum.accumulator.storage import Storage
    from hpcaccum.dtypes import Array

# After an interruption, seconds to wait for the answer of an agent, which usually is on
# its way. A user who presses Ctrl-C must get the program back.
_GRACE = 1.0


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
        # The step and the slot of a gradient to which an agent has not answered.
        self._unanswered: tuple[int, int | None] | None = None

    def submit(self, array: Any, local_step: int) -> Receipt:
        """Add a gradient to the open round unless it is stale.

        Raises:
            InvalidArgumentError: If it does not fit; nothing was added.
            WaitTimeoutError: If an agent does not answer in time, and may still admit
                it; also if it has not answered to the gradient before, and nothing was
                done with this one.
            BrokenObjectError: If an exception has ended an earlier call.
            Exception: Anything else: this rank has left the accumulator.
        """
        source = None
        if not (self._storage.sends and self._is_stale(array, local_step)):
            # What may fail comes before the admission.
            source = self._storage.prepare(array)

        def attempt() -> Receipt | None:
            with self._turn.hold("apply_grad"):
                return self._try(array, source, local_step)

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
        if self._unanswered:
            self._settle(Deadline(None, self._call))
        slot = self._buffers.slot_of(array)
        submit = self._submit_remotely if self._fits_remote(array) else self._submit
        try:
            return submit(array, source, local_step, slot)
        except InvalidArgumentError:
            # Raised before the gradient was admitted.
            raise
        except BaseException as error:
            if not self._unanswered:
                self._protocol.membership.lose(error)
            elif not isinstance(error, WaitTimeoutError):
                # Others may wait for this gradient.
                with contextlib.suppress(WaitTimeoutError):
                    self._settle(Deadline(_GRACE, self._call))
            raise
        finally:
            self._protocol.end_intent()

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
            self._protocol.counters.count(receipt)
            self._protocol.words.flush()
            return receipt
        if source is None:
            # It seemed stale, but the step was lowered since.
            source = self._storage.prepare(array)
        before, in_place = self._buffers.record(parity), False
        if before:
            done = before.written()._replace(shape=shape)
        else:
            buffer, in_place = self._buffers.choose(array, slot, parity)
            done = Record(buffer, 1, 0, shape)
        apart = self._storage.apart
        if before or not apart:
            before = done._replace(number=done.number - 1, adding=1)
            self._protocol.mark_adding(parity, before)
        if not (in_place and apart):
            self._storage.write(parity, done.buffer, source, done.number == 1)
        self._protocol.counters.count(receipt)
        self._end(receipt, parity, done, before, slot)
        return receipt

    def _end(
        self,
        receipt: Receipt,
        parity: int,
        done: Record,
        before: Record | None,
        slot: int | None,
    ) -> None:
        """Publish a gradient that is in place."""
        # The round may be over without it.
        self._protocol.membership.check_counts()
        self._protocol.put_record(parity, done, before)
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
        self._remote.forget()
        self._unanswered = local_step, slot
        answer = self._remote.admit(local_step, only, fresh, placed)
        self._unanswered = None
        if answer.accepted is None:
            # Rare: there is an error to raise, or the round is another one by now.
            return self._submit(array, source, local_step, slot)
        receipt = answer.receipt(local_step)
        if self._note(answer, receipt, slot):
            return receipt
        self._protocol.note_intent(answer.parity)
        before, done = answer.held, Record.of(answer.record)
        if before:
            before = before._replace(adding=1)
        self._buffers.take_back(done.buffer)
        self._storage.write(answer.parity, done.buffer, source, before is None)
        self._protocol.counters.count(receipt)
        self._end(receipt, answer.parity, done, before, slot)
        return receipt

    def _fresh(self, placed: int | None, slot: int | None, parity: int) -> Fresh | None:
        """Return the first buffer in a round, and whether the gradient is there."""
        if placed is not None:
            return placed, True
        free = self._buffers.free_for(slot, parity)
        return (free[0], False) if free else None

    def _note(
        self, answer: AdmissionAnswer, receipt: Receipt, slot: int | None
    ) -> bool:
        """Note what an agent has done; return whether nothing is left to do."""
        if receipt:
            self._buffers.note(answer.parity, answer.held)
            if not answer.complete:
                return False
            done = Record.of(answer.record)
            self._buffers.settle(answer.parity, done, slot, answer.step)
        self._protocol.counters.note(receipt)
        return True

    def _settle(self, deadline: Deadline) -> None:
        """Wait for the answer to a gradient whose call has ended before."""
        assert self._remote is not None
        assert self._unanswered is not None
        local_step, slot = self._unanswered
        self._remote.extend(deadline)
        answer = self._remote.settled()
        self._unanswered = None
        if answer is None or answer.accepted is None:
            return
        if not self._note(answer, answer.receipt(local_step), slot):
            # The caller may have changed the gradient since: it is left out.
            if answer.held:
                self._protocol.put_record(answer.parity, answer.held, None)
            self._protocol.note_intent(answer.parity)
            self._protocol.end_intent()
            self._protocol.words.flush()

    def slot(self, shape: tuple[int, ...], deadline: Deadline) -> Array:
        """Return a buffer that no round holds; wait until there is one."""

        def lend() -> Array | None:
            with self._turn.hold("slot", deadline):
                # The gradient before may be in a slot.
                if self._unanswered:
                    self._settle(deadline)
                return self._buffers.lend(shape)

        return deadline.wait(lend, self._buffers.missing)

    def finish(self, deadline: Deadline | None = None) -> None:
        """Wait for the answer to a gradient whose `submit` has raised.

        Raises:
            WaitTimeoutError: If it does not come this time, either.
        """
        if self._unanswered:
            with self._turn.hold("apply_grad", deadline):
                if self._unanswered:
                    self._settle(deadline or Deadline(None, self._call))

    def note_finished(self, step: int) -> None:
        """Note that the takes of all rounds of steps below ``step`` have returned."""
        with self._turn.hold("slot"):
            self._buffers.note_finished(step)

    def leave(self) -> None:
        """Promise that this rank contributes no more gradients."""
        self.finish()
        with self._turn.hold("leave"):
            self._protocol.membership.leave()

    def free(self) -> None:
        """Drop the references to the memory of slots."""
        self._buffers.free()
