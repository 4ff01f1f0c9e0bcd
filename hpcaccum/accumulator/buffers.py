"""One rank's two buffers: which rounds hold them, and who has them as slots."""

from __future__ import annotations

import math
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

from hpcaccum.accumulator.state import admits
from hpcaccum.device import is_device
from hpcaccum.errors import InvalidArgumentError
from hpcaccum.overlap import overlap, same_elements

if TYPE_CHECKING:
    from hpcaccum.accumulator.protocol import AdmissionProtocol, Admitted
    from hpcaccum.accumulator.state import Record
    from hpcaccum.accumulator.storage import Storage
    from hpcaccum.dtypes import Array

# What a call waits for if slots of other threads leave no buffer, for messages.
OTHER_THREAD = "another thread of this rank to apply the slot that it holds"


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

    def is_in(self, array: Any, slot: int) -> bool:
        """Whether a gradient that is in a slot is all of it."""
        return same_elements(array, self._lent[slot].array)

    def fresh(self, slot: int | None) -> tuple[int | None, int | None]:
        """Return the first buffer for a round of each parity; None if there is none.

        ``slot`` is the one that contains the gradient, if one does.
        """
        if not self._lent:
            one, two = self._records
            return 1 - two.buffer if two else 0, 1 - one.buffer if one else 0
        others = self._of_others(slot)
        return self._first(0, others), self._first(1, others)

    def _first(self, parity: int, others: set[int]) -> int | None:
        """Return the first buffer for a round, without slots of other threads."""
        held, free = self._records[1 - parity], {0, 1} - others
        if held and free == {held.buffer}:
            # It may have been reduced.
            held = self._current(1 - parity)
        if held:
            free.discard(held.buffer)
        # Prefer a buffer that the calling thread does not have as a slot.
        return min(free, key=lambda each: (each in self._lent, each), default=None)

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

    def slot_of(self, array: Any) -> int | None:
        """Return the slot that contains an array; None if it is elsewhere."""
        if not self._slots or array.base is None or is_device(array):
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
        mine = {0, 1} - self._of_others()
        # First what needs no question to another node.
        free = mine - {record.buffer for record in self._records if record}
        if not free:
            held = filter(None, map(self._current, range(2)))
            free = mine - {record.buffer for record in held}
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
            return OTHER_THREAD
        return "the take that is reducing both buffers of this rank"

    def free(self) -> None:
        """Drop the references to the memory of slots."""
        self._lent.clear()
        self._slots.clear()
