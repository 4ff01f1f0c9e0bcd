"""One rank's gradients: admit each, write it to the storage, publish its record."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, NamedTuple

from hpcaccum.accumulator.buffers import OTHER_THREAD, RankBuffers
from hpcaccum.accumulator.one_thread import OneThread
from hpcaccum.accumulator.protocol import Request
from hpcaccum.deadline import Deadline, grace
from hpcaccum.errors import InvalidArgumentError, WaitTimeoutError
from hpcaccum.spans import traced

if TYPE_CHECKING:
    from hpcaccum.accumulator.host_calls import HostCalls
    from hpcaccum.accumulator.protocol import AdmissionProtocol, Admitted
    from hpcaccum.accumulator.receipts import Receipt
    from hpcaccum.accumulator.storage import Storage
    from hpcaccum.dtypes import Array
    from hpcaccum.nodes import Call


class Gradient(NamedTuple):
    """A gradient on its way.

    Attributes:
        array: As the user gave it.
        source: As the storage writes it.
        local_step: The step at which it was computed.
        weight: What it counts.
    """

    array: Any
    source: Any
    local_step: int
    weight: float


class Unanswered(NamedTuple):
    """What the agent of the host's node was asked to do, and may not have done yet.

    Attributes:
        call: Its answer.
        slot: Of the gradient that may be admitted.
        contents: What was sent of a gradient that is in no slot.
    """

    call: Call
    slot: int | None
    contents: bytes | None = None


class Writer:
    """Has gradients of this rank admitted, and writes them to their round.

    By the agent of the host's node, if ``calls`` are those of another node.
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
        # What may fail comes before the admission.
        source = self._storage.prepare(array, weight)
        grad = Gradient(array, source, local_step, weight)
        receipt = self._attempt(grad)
        if receipt is None:
            deadline = Deadline(None, self._call)
            receipt = deadline.wait(lambda: self._attempt(grad), lambda: OTHER_THREAD)
        return receipt

    def _attempt(self, grad: Gradient) -> Receipt | None:
        """Submit; None if slots of other threads leave no buffer at the moment."""
        with self._turn.hold("apply_grad"):
            self._protocol.membership.check_present("apply")
            if self._unanswered:
                self._settle(Deadline(None, self._call))
            slot = self._buffers.slot_of(grad.array)
            try:
                return self._submit(grad, slot)
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

    def _submit(self, grad: Gradient, slot: int | None) -> Receipt | None:
        self._wake_agent()
        self._buffers.check_room(grad.array, grad.local_step)
        admitted = self._admit(grad, slot)
        if admitted.accepted is None:
            return None
        if record := admitted.record:
            if not admitted.complete:
                parity, before = admitted.parity, admitted.before
                source, weight = grad.source, admitted.factor * grad.weight
                self._storage.write(parity, record.buffer, source, weight, before)
            self._buffers.note_admitted(admitted, slot)
            # The agent has published one that is complete.
            if self._calls is None or not admitted.complete:
                self._arrive(admitted)
        return admitted.receipt()

    @traced("admission", lambda _, admitted: admitted.receipt().shown())
    def _admit(self, grad: Gradient, slot: int | None) -> Admitted:
        """Have a gradient admitted, or dropped."""
        array, _, step, weight = grad
        buffers, offer = self._buffers, self._protocol.shapes.offer
        in_place = buffers.is_in(array, slot)
        fresh = (slot, slot) if in_place else buffers.fresh(slot)
        if self._calls is None:
            request = Request(step, weight, fresh, in_place)
            return self._protocol.admit(self._rank, request, lambda: offer(array))
        offered, sent = offer(array), None
        if not (in_place or offered.misfit):
            sent = self._storage.short_of(grad.source)
        contents = sent if slot is None or not in_place else self._storage.short(slot)
        # The copy of the agent counts.
        arrived = in_place or sent is not None
        request = Request(step, weight, fresh, arrived, offered, contents)
        call = self._calls.admit(request)
        admitted: Admitted = self._answer(Unanswered(call, slot, sent))
        self._put(admitted, sent)
        return admitted

    def _put(self, admitted: Admitted, sent: bytes | None) -> None:
        """Store a gradient of which the agent has a copy; others may be added."""
        if sent is not None and admitted.complete:
            assert admitted.record is not None
            self._storage.put(admitted.record.buffer, sent)

    def _arrive(self, admitted: Admitted) -> None:
        """Publish a gradient that is in place."""
        if self._calls is None:
            self._protocol.arrive(self._rank, admitted)
        else:
            self._answer(Unanswered(self._calls.arrive(admitted), None))

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
        _, slot, sent = self._unanswered
        try:
            admitted = self._answer(self._unanswered, deadline)
        except InvalidArgumentError:
            return
        # True is the answer to one that was in place.
        if admitted is True or not admitted.accepted:
            return
        if admitted.complete:
            self._put(admitted, sent)
            self._buffers.note_admitted(admitted, slot)
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
