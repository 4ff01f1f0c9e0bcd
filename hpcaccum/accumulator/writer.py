"""One rank's gradients: admit each, write it to the storage, publish its record."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, NamedTuple

from hpcaccum.accumulator.buffers import OTHER_THREAD, RankBuffers
from hpcaccum.accumulator.one_thread import OneThread
from hpcaccum.deadline import Deadline, grace
from hpcaccum.device import is_device
from hpcaccum.errors import InvalidArgumentError, WaitTimeoutError
from hpcaccum.spans import traced

if TYPE_CHECKING:
    from hpcaccum.accumulator.host_calls import HostCalls
    from hpcaccum.accumulator.protocol import AdmissionProtocol, Admitted, Fresh
    from hpcaccum.accumulator.receipts import Receipt
    from hpcaccum.accumulator.storage import Storage
    from hpcaccum.dtypes import Array
    from hpcaccum.nodes import Call


class Unanswered(NamedTuple):
    """What the agent of the host's node was asked to do, and may not have done yet.

    Attributes:
        call: Its answer.
        slot: Of the gradient that may be admitted.
        contents: What was sent of a gradient that is in no slot.
        arrives: Whether the gradient is admitted and in place.
    """

    call: Call
    slot: int | None
    contents: bytes | None = None
    arrives: bool = False


class Writer:
    """Has gradients of this rank admitted, and writes them to their round.

    Args:
        protocol: Admits them.
        storage: Where they are written.
        rank: This rank.
        calls: Those of the agent of the host's node, between nodes.
        what: Name for messages.
    """

    def __init__(
        self,
        protocol: AdmissionProtocol,
        storage: Storage,
        rank: int,
        calls: HostCalls | None,
        what: str,
    ) -> None:
        self._protocol, self._storage, self._rank = protocol, storage, rank
        # Of a rank on another node.
        self._calls = None if calls is None or calls.near else calls
        # The agent looks for gradients of other ranks, which often come soon.
        self._wake_agent = calls.wake if calls is not None else lambda: None
        self._buffers = RankBuffers(protocol, storage)
        self._turn, self._call = OneThread(what), f"{what}: apply_grad"
        # The last step that an agent has named.
        self._seen = 0
        self._unanswered: Unanswered | None = None

    def submit(self, array: Any, local_step: int, weight: float) -> Receipt:
        """Add a gradient, with a weight, to the open round unless it is stale.

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
            source = self._storage.prepare(array, weight)

        def attempt() -> Receipt | None:
            with self._turn.hold("apply_grad"):
                return self._try(array, source, local_step, weight)

        receipt = attempt()
        if receipt is None:
            deadline = Deadline(None, self._call)
            receipt = deadline.wait(attempt, lambda: OTHER_THREAD)
        return receipt

    def _is_stale(self, array: Any, local_step: int) -> bool:
        """Return whether a gradient need not be prepared, as it will be dropped."""
        # To ask costs less than a copy from a device, more than one of memory.
        if self._calls is None or is_device(array):
            self._seen = self._protocol.state().step
        return local_step < self._seen

    def _try(
        self, array: Any, source: Any, local_step: int, weight: float
    ) -> Receipt | None:
        """Submit; None if slots of other threads leave no buffer at the moment."""
        self._protocol.membership.check_present("apply")
        if self._unanswered:
            self._settle(Deadline(None, self._call))
        slot = self._buffers.slot_of(array)
        try:
            return self._submit(array, source, local_step, weight, slot)
        except InvalidArgumentError:
            # Raised before the gradient was admitted.
            raise
        except BaseException as error:
            if not self._unanswered:
                self._protocol.membership.lose(error)
                self._protocol.end_intent(self._rank)
            elif not isinstance(error, WaitTimeoutError):
                # Others may wait for this gradient.
                with contextlib.suppress(WaitTimeoutError):
                    self._settle(grace(self._call))
            raise

    def _possible(self, array: Any, slot: int | None) -> tuple[bool, int | None]:
        """Return whether a gradient has a buffer, and if only for one parity, which."""
        if not self._buffers.has_room(slot):
            only = self._buffers.joined()
            return only is not None, only
        overflow = self._buffers.overflow(array)
        return True, 1 - overflow[0] if overflow else None

    def _submit(
        self,
        array: Any,
        source: Any,
        local_step: int,
        weight: float,
        slot: int | None,
    ) -> Receipt | None:
        """Do as `_try`.

        Raises:
            InvalidArgumentError: Also if its rows have no room in the open round.
        """
        self._wake_agent()
        possible, only = self._possible(array, slot)
        if not possible:
            return None
        admitted = self._admit(array, source, local_step, weight, slot, only)
        if admitted.accepted is None:
            if overflow := self._buffers.overflow(array):
                raise overflow[1]
            return None
        self._seen = admitted.step
        if not admitted.accepted:
            return admitted.receipt()
        parity, record = admitted.parity, admitted.record
        assert record is not None
        if not admitted.complete:
            if source is None:
                # It seemed stale, but the step was lowered since.
                source = self._storage.prepare(array, weight)
            before = admitted.before
            if before is None and record.buffer != slot:
                self._buffers.take_back(record.buffer)
            self._storage.write(parity, record.buffer, source, weight, before)
        self._buffers.settle(admitted, slot)
        if not admitted.complete:
            self._arrive(admitted)
        return admitted.receipt()

    @traced("admission", lambda _, admitted: admitted.receipt().shown())
    def _admit(
        self,
        array: Any,
        source: Any,
        local_step: int,
        weight: float,
        slot: int | None,
        only: int | None,
    ) -> Admitted:
        """Have a gradient admitted, or dropped."""
        offer, buffers = self._protocol.shapes.offer, self._buffers
        placed, sent = slot if buffers.is_in(array, slot) else None, None
        if self._calls is not None:
            offered = offer(array)
            if placed is None and not offered.misfit:
                sent = self._storage.short_of(source)

        def fresh(parity: int) -> Fresh | None:
            """Return the first buffer in a round, and whether the gradient is there."""
            if placed is not None:
                return placed, True
            free = buffers.free_for(slot, parity)
            # The copy of the agent counts.
            return (free[0], sent is not None) if free else None

        if self._calls is None:
            return self._protocol.admit(
                self._rank,
                local_step,
                lambda: offer(array),
                fresh,
                weight=weight,
                only=only,
            )
        contents = sent if placed is None else self._storage.short(placed)
        places = fresh(0), fresh(1)
        call = self._calls.admit(local_step, offered, places, weight, only, contents)
        admitted: Admitted = self._answer(Unanswered(call, slot, sent))
        self._put(admitted, sent)
        return admitted

    def _put(self, admitted: Admitted, sent: bytes | None) -> None:
        """Store a gradient of which the agent has a copy; others may be added."""
        if sent is not None and admitted.complete:
            assert admitted.record is not None
            self._buffers.take_back(admitted.record.buffer)
            self._storage.put(admitted.record.buffer, sent)

    def _arrive(self, admitted: Admitted) -> None:
        """Publish a gradient that is in place."""
        if self._calls is None:
            self._protocol.arrive(self._rank, admitted)
        else:
            self._answer(Unanswered(self._calls.arrive(admitted), None, arrives=True))

    def _answer(self, unanswered: Unanswered, deadline: Deadline | None = None) -> Any:
        """Wait for an answer of the agent of the host's node."""
        self._unanswered, call = unanswered, unanswered.call
        try:
            return call.result(deadline or Deadline(None, self._call))
        finally:
            if call.answer is not None:
                self._unanswered = None

    def _settle(self, deadline: Deadline) -> None:
        """Wait for the answer to a gradient whose call has ended before."""
        assert self._calls is not None
        assert self._unanswered is not None
        _, slot, sent, arrives = self._unanswered
        try:
            admitted = self._answer(self._unanswered, deadline)
        except InvalidArgumentError:
            return
        if arrives or not admitted.accepted:
            return
        if admitted.complete:
            self._put(admitted, sent)
            self._buffers.settle(admitted, slot)
        else:
            # The caller may have changed the gradient since: it is left out.
            self._calls.abandon(admitted).result(deadline)

    def slot(self, shape: tuple[int, ...], deadline: Deadline) -> Array:
        """Return a buffer that no round holds; wait until there is one."""

        def lend() -> Array | None:
            with self._turn.hold("slot", deadline):
                # The gradient before may be in a slot.
                if self._unanswered:
                    self._settle(deadline)
                # It may ask for words of another node.
                with deadline.extended().limits():
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
