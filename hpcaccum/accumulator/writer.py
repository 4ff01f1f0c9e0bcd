"""One rank's gradients: admit each, write it to the storage, publish its record."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, NamedTuple

from hpcaccum.accumulator.buffers import OTHER_THREAD, RankBuffers
from hpcaccum.accumulator.protocol import Request
from hpcaccum.accumulator.turns import OneThread
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
    """A gradient as the user gave it, and as the storage writes it: its source."""

    array: Any
    source: Any
    local_step: int
    weight: float


class Unanswered(NamedTuple):
    """What the agent of the host's node was asked to do, and may not have done yet."""

    call: Call
    # The slot of the gradient that may be admitted, if it is in one; what was sent.
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
        self._agent = calls
        self._buffers = RankBuffers(protocol, storage)
        self._turn, self._call = OneThread(what), f"{what}: apply_grad"
        self._unanswered: Unanswered | None = None

    def submit(self, array: Any, local_step: int, weight: float) -> Receipt:
        """Add a gradient, with a weight, to the open round unless it is stale.

        Its errors are those of `ConditionalAccumulator.apply_grad`.
        """
        # What may fail comes before the admission.
        source = self._storage.prepare(array, weight)
        grad = Gradient(array, source, local_step, weight)
        receipt = self._submit(grad)
        if receipt is None:
            deadline = Deadline(None, self._call)
            receipt = deadline.wait(lambda: self._submit(grad), lambda: OTHER_THREAD)
        return receipt

    def _submit(self, grad: Gradient) -> Receipt | None:
        """Submit; None if slots of other threads leave no buffer at the moment."""
        with self._turn.hold("apply_grad"):
            self._protocol.membership.check_present("apply")
            if self._unanswered:
                self._settle(Deadline(None, self._call))
            slot = self._buffers.slot_of(grad.array)
            try:
                admitted = self._admit(grad, slot)
                if admitted.record:
                    self._write(grad, admitted, slot)
                return admitted.receipt
            except InvalidArgumentError:
                # Raised before the gradient was admitted.
                raise
            except BaseException as error:
                if not self._unanswered:
                    self._protocol.membership.lose(error)
                elif not isinstance(error, WaitTimeoutError):
                    # Others may wait for this gradient.
                    with contextlib.suppress(WaitTimeoutError):
                        self._settle(grace(self._call))
                raise

    @traced(
        "admission",
        lambda _, found: {} if found.receipt is None else found.receipt.shown(),
    )
    def _admit(self, grad: Gradient, slot: int | None) -> Admitted:
        """Have a gradient admitted, or dropped."""
        if self._agent is not None:
            # It looks for gradients of other ranks, which often come soon.
            self._agent.wake()
        array, _, step, weight = grad
        buffers, storage = self._buffers, self._storage
        if storage.has_rows:
            buffers.check_room(array, step)
        in_place = slot is not None and buffers.is_in(array, slot)
        fresh = (slot, slot) if in_place else buffers.fresh(slot)
        misfit, sent = self._protocol.shapes.misfit(array), None
        request = Request(step, weight, array.shape, misfit, fresh, in_place)
        if self._calls is None:
            return self._protocol.admit(self._rank, request)
        if not misfit and (sent := storage.short(grad.source)) is not None:
            # The copy of the agent counts.
            request = request._replace(in_place=True, contents=sent)
        call = self._calls.admit(request)
        admitted: Admitted = self._answer(Unanswered(call, slot, sent))
        self._put(admitted, sent)
        return admitted

    def _write(self, grad: Gradient, admitted: Admitted, slot: int | None) -> None:
        """Write a gradient that is admitted, unless it is in place; publish it."""
        assert admitted.record is not None
        assert admitted.receipt is not None
        if not admitted.complete:
            weight = admitted.receipt.factor * grad.weight
            index, before = admitted.record.buffer, admitted.before
            self._storage.write(admitted.parity, index, grad.source, weight, before)
        self._buffers.note_admitted(admitted, slot)
        if self._calls is None:
            self._protocol.arrive(self._rank, admitted)
        elif not admitted.complete:
            # The agent has published one that is complete.
            self._answer(Unanswered(self._calls.arrive(admitted), None))

    def _put(self, admitted: Admitted, sent: bytes | None) -> None:
        """Store a gradient of which the agent has a copy; others may be added."""
        if sent is not None and admitted.complete:
            assert admitted.record is not None
            self._storage.keep(self._rank, admitted.record.buffer, sent)

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
        if admitted is True or not admitted.receipt:
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
        """Wait for the answer to a gradient whose `submit` has raised."""
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
