"""One rank's gradients: admit each, write it to a buffer, publish its record."""

from __future__ import annotations

import contextlib
import math
import threading
from typing import Any, NamedTuple

from hpcaccum.accumulator.host_calls import HostCalls
from hpcaccum.accumulator.protocol import AdmissionProtocol, Admitted, Fresh, Request
from hpcaccum.accumulator.receipts import Receipt
from hpcaccum.accumulator.state import Record, admits
from hpcaccum.accumulator.storage import Storage
from hpcaccum.accumulator.turns import OneThread
from hpcaccum.deadline import Deadline, grace
from hpcaccum.device import is_device
from hpcaccum.dtypes import Array
from hpcaccum.errors import InvalidArgumentError, WaitTimeoutError
from hpcaccum.nodes import Call
from hpcaccum.overlap import overlap, same_elements
from hpcaccum.spans import traced

# What a call waits for if slots of other threads leave no buffer, for messages.
_OTHER_THREAD = "another thread of this rank to apply the slot that it holds"


class Gradient(NamedTuple):
    """A gradient of this rank."""

    array: Any
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

    The agent of the host's node admits them if ``calls`` are not `near`.
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
        self._calls = calls
        self._buffers = RankBuffers(protocol, storage)
        self._turn, self._call = OneThread(what), f"{what}: apply_grad"
        self._unanswered: Unanswered | None = None

    def submit(self, array: Any, local_step: int, weight: float) -> Receipt:
        """Add a gradient, with a weight, to the open round unless it is stale."""
        # What may fail comes before the admission.
        self._storage.prepare(array, weight)
        grad = Gradient(array, local_step, weight)
        receipt = self._submit(grad)
        if receipt is None:
            deadline = Deadline(None, self._call)
            receipt = deadline.wait(lambda: self._submit(grad), lambda: _OTHER_THREAD)
        return receipt

    def _submit(self, grad: Gradient) -> Receipt | None:
        """Submit; None if slots of other threads leave no buffer at the moment."""
        with self._turn.hold("apply_grad"):
            self._protocol.membership.check_present()
            if self._unanswered:
                self._settle()
            slot, fresh, in_place = self._buffers.choose(grad.array)
            try:
                admitted = self._admit(grad, slot, fresh, in_place)
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
    def _admit(
        self, grad: Gradient, slot: int | None, fresh: Fresh, in_place: bool
    ) -> Admitted:
        """Have a gradient admitted, or dropped; see `RankBuffers.choose`."""
        array, step, weight = grad
        calls, storage, shapes = self._calls, self._storage, self._protocol.shapes
        if storage.has_rows:
            self._buffers.check_room(array, step)
        usual = array.shape == shapes.only
        shape, misfit = (None, None) if usual else (array.shape, shapes.misfit(array))
        scaled = not (in_place or storage.has_rows)
        request = Request(step, weight, shape, misfit, fresh, in_place, scaled)
        if calls is None or calls.near:
            if calls is not None:
                # Gradients of other ranks often come soon: the agent stops its nap.
                calls.agent.wake()
            return self._protocol.admit(self._rank, request)
        sent = None if misfit else storage.short(array)
        if sent is not None:
            # The copy of the agent counts.
            request = request._replace(in_place=True, scaled=False, contents=sent)
        unanswered = Unanswered(calls.admit(request), slot, sent)
        admitted: Admitted = self._answer(unanswered)
        return admitted

    def _write(self, grad: Gradient, admitted: Admitted, slot: int | None) -> None:
        """Write a gradient that is admitted, unless it is in place; publish it."""
        assert admitted.record is not None
        assert admitted.receipt is not None
        if not admitted.complete:
            weight = admitted.receipt.factor * grad.weight
            index, before = admitted.record.buffer, admitted.before
            self._storage.write(admitted.parity, index, grad.array, weight, before)
        self._buffers.note_admitted(admitted, slot)
        if self._calls is None or self._calls.near:
            self._protocol.arrive(self._rank, admitted)
        elif not admitted.complete:
            # The agent has published one that is complete.
            self._answer(Unanswered(self._calls.arrive(admitted), None))

    def _answer(self, unanswered: Unanswered, deadline: Deadline | None = None) -> Any:
        """Wait for an answer of the agent of the host's node."""
        self._unanswered, (call, _, sent) = unanswered, unanswered
        try:
            answer = call.result(deadline or Deadline(None, self._call))
        finally:
            if call.answer is not None:
                self._unanswered = None
        if sent is not None and answer.complete:
            # The agent has a copy, but other gradients may be added to this one.
            self._storage.keep(self._rank, answer.record.buffer, sent)
        return answer

    def _settle(self, deadline: Deadline | None = None) -> None:
        """Wait for the answer to a gradient whose call has ended before, if any."""
        if self._unanswered is None:
            return
        assert self._calls is not None
        slot = self._unanswered.slot
        try:
            admitted = self._answer(self._unanswered, deadline)
        except InvalidArgumentError:
            return
        # True is the answer to one that was in place.
        if admitted is True or not admitted.receipt:
            return
        if admitted.complete:
            self._buffers.note_admitted(admitted, slot)
        else:
            # The caller may have changed the gradient since: it is left out.
            self._calls.abandon(admitted).result(deadline)

    def slot(self, shape: tuple[int, ...], deadline: Deadline) -> Array:
        """Return a buffer that no round holds; wait until there is one."""

        def lend() -> Array | None:
            with self._turn.hold("slot", deadline):
                # The gradient before may be in a slot.
                self._settle(deadline)
                # It may ask for words of another node.
                with deadline.extended().limits():
                    return self._buffers.lend(shape)

        return deadline.wait(lend, self._buffers.missing)

    def finish(self, deadline: Deadline | None = None) -> None:
        """Wait for the answer to a gradient whose `submit` has raised."""
        if self._unanswered:
            with self._turn.hold("apply_grad", deadline):
                self._settle(deadline)

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


class Lent(NamedTuple):
    """A buffer that a thread has got as a slot and has not applied yet."""

    array: Array
    thread: threading.Thread


class RankBuffers:
    """The two buffers of this rank, for its `Writer`, which serializes all calls.

    A buffer is not tied to a parity. While a round that is being reduced holds one, the
    other serves the open round; a gradient that was computed in a slot is admitted to
    the round that is open by then.
    """

    def __init__(self, protocol: AdmissionProtocol, storage: Storage) -> None:
        self._protocol, self._storage = protocol, storage
        # This rank's record of the round of each parity; None if it surely has none.
        self._records: list[Record | None] = [None, None]
        self._last_parity = 0
        # The step of each of these rounds.
        self._steps = [0, 0]
        # By buffer: who has it now, and the memory of every slot since the start.
        self._lent: dict[int, Lent] = {}
        self._slots: dict[int, Array] = {}

    def choose(self, array: Any) -> tuple[int | None, Fresh, bool]:
        """Return the slot that contains a gradient, or None; `fresh` and `in_place`.

        These are for its `Request`; no other round holds a buffer of `fresh`.
        """
        slot = self._slot_of(array) if self._slots else None
        if not self._lent:
            # The usual case, with the result that the last line would have.
            one, two = self._records
            first = 1 - two.buffer if two else 0, 1 - one.buffer if one else 0
            return slot, first, False
        if slot is not None and same_elements(array, self._lent[slot].array):
            return slot, (slot, slot), True
        mine = {0, 1} - self._of_others(slot)
        return slot, (self._first(mine, 1), self._first(mine, 0)), False

    def _first(self, buffers: set[int], other: int) -> int | None:
        """Return the first buffer that the round of the other parity does not hold."""
        free = self._free(buffers, other)
        # Prefer a buffer that the calling thread does not have as a slot.
        return min(free, key=lambda each: (each in self._lent, each), default=None)

    def _free(self, buffers: set[int], *parities: int) -> set[int]:
        """Return those of some buffers that no round of these parities holds."""
        held = filter(None, [self._records[parity] for parity in parities])
        free = buffers - {record.buffer for record in held}
        if buffers and not free:
            # Rounds may have been reduced; to find out may take words of another node.
            held = filter(None, map(self._current, parities))
            free = buffers - {record.buffer for record in held}
        return free

    def note_admitted(self, admitted: Admitted, slot: int | None) -> None:
        """Note a gradient in the open round; take back slots of the calling thread."""
        parity = self._last_parity = admitted.parity
        assert admitted.receipt is not None
        self._records[parity] = admitted.record
        self._steps[parity] = admitted.receipt.global_step
        if self._lent:
            for index in self._lent.keys() - self._of_others(slot):
                self._take_back(index)

    def _take_back(self, index: int) -> None:
        """End the loan of a slot: NumPy refuses to write to the array from now on."""
        if index in self._lent:
            self._lent[index].array.flags.writeable = False
            del self._lent[index]

    def _slot_of(self, array: Any) -> int | None:
        """Return the slot that contains an array; None if it is elsewhere."""
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
                    "the gradient is in a slot that was already applied: call slot() "
                    "again for each gradient"
                )
        return None

    def check_room(self, grad: Any, local_step: int) -> None:
        """Raise InvalidArgumentError if a gradient has no room in the open round.

        Its rows have room in a buffer that has none yet.
        """
        parity, protocol = self._last_parity, self._protocol
        if (record := self._records[parity]) is None:
            return

        def joins() -> bool:
            state = protocol.state()
            is_open = state.parity == parity and protocol.holds_gradient(parity)
            return is_open and bool(admits(state.step, local_step, protocol.max_lag))

        self._storage.check_room(record.buffer, grad, joins)

    def _of_others(self, slot: int | None = None) -> set[int]:
        """Return the slots of other threads that are alive."""
        if self._lent.keys() <= {slot}:
            return set()
        me = threading.current_thread()
        return {
            index
            for index, lent in self._lent.items()
            if index != slot and lent.thread is not me and lent.thread.is_alive()
        }

    def note_finished(self, step: int) -> None:
        """Note that the takes of all rounds of steps below ``step`` have returned."""
        for parity, each in enumerate(self._steps):
            if each < step:
                self._records[parity] = None

    def _current(self, parity: int) -> Record | None:
        """Return this rank's record of a round; forget one that was reduced."""
        record = self._records[parity]
        if record and not self._protocol.holds_gradient(parity):
            record = self._records[parity] = None
        return record

    def lend(self, shape: tuple[int, ...]) -> Array | None:
        """Return a buffer that no round holds, as a slot; None if there is none."""
        free = self._free({0, 1} - self._of_others(), 0, 1)
        if not free:
            return None
        # A second call without an apply returns the same slot.
        index = min(free, key=lambda each: (each not in self._lent, each))
        me, lent = threading.current_thread(), self._lent.get(index)
        if lent and lent.thread is me and lent.array.shape == shape:
            return lent.array
        self._take_back(index)
        memory = self._slots[index] = self._storage.buffer(index)
        array = memory[: math.prod(shape)].reshape(shape)
        self._lent[index] = Lent(array, me)
        return array

    def missing(self) -> str:
        """Return what `lend` waits for, for messages."""
        if self._of_others():
            return _OTHER_THREAD
        return "the take that is reducing both buffers of this rank"

    def free(self) -> None:
        """Drop the references to the memory of slots."""
        self._lent.clear()
        self._slots.clear()
