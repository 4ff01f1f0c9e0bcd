"""One rank's two buffers: which rounds hold them, and who has them as slots."""

from __future__ import annotations

import math
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

from hpcaccum.accumulator.storage import Sums
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

    Args:
        protocol: Has this rank's records.
        storage: Has the memory.
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

    def is_in(self, array: Any, slot: int | None) -> bool:
        """Whether a gradient is in its buffer already: in ``slot``, and all of it."""
        return slot is not None and same_elements(array, self._lent[slot].array)

    def free_for(self, slot: int | None, parity: int) -> list[int]:
        """Return the buffers for a round that none holds, the best one first."""
        other = self._records[1 - parity]
        free = [1 - other.buffer] if other else [0, 1]
        if self._lent:
            others = self._of_others(slot)
            free = [buffer for buffer in free if buffer not in others]
            # Prefer a buffer that the calling thread does not have as a slot.
            free.sort(key=self._lent.__contains__)
        return free

    def settle(self, admitted: Admitted, slot: int | None) -> None:
        """Note a gradient in the open round; take back slots of the calling thread."""
        parity = self._last_parity = admitted.parity
        self._records[parity], self._steps[parity] = admitted.record, admitted.step
        if self._lent:
            for index in self._lent.keys() - self._of_others(slot):
                self.take_back(index)

    def take_back(self, index: int) -> None:
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

    def has_room(self, slot: int | None) -> bool:
        """Return whether a gradient in ``slot``, or in none, has a buffer."""
        if len(self._lent) <= (slot is not None):
            return True
        others = self._of_others(slot)
        return not others or bool({0, 1} - others - self._held())

    def joined(self) -> int | None:
        """Return the open parity if this rank has a gradient in the open round."""
        parity = self._protocol.state().parity
        record = self._records[parity]
        held = record is not None and self._protocol.holds_gradient(parity)
        return parity if held else None

    def overflow(self, grad: Any) -> tuple[int, InvalidArgumentError] | None:
        """Return the open parity, and the error, if a gradient has no room in it.

        The rows of a gradient have room in a buffer that has none yet.
        """
        storage, parity = self._storage, self._last_parity
        record = self._records[parity]
        if record is None or isinstance(storage, Sums):
            return None
        # First what reads memory of this rank only.
        if storage.surely_fits(record.buffer, grad) or self.joined() != parity:
            return None
        error = storage.overflow(record.buffer, grad)
        return None if error is None else (parity, error)

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

    def _noted(self) -> set[int]:
        """Return the buffers that rounds may hold; asks nobody."""
        return {record.buffer for record in self._records if record}

    def _held(self) -> set[int]:
        """Return the buffers that rounds hold."""
        for parity, record in enumerate(self._records):
            if record and not self._protocol.holds_gradient(parity):
                self._records[parity] = None
        return self._noted()

    def lend(self, shape: tuple[int, ...]) -> Array | None:
        """Return a buffer that no round holds, as a slot; None if there is none."""
        others = self._of_others()
        free = {0, 1} - others - self._noted() or {0, 1} - others - self._held()
        if not free:
            return None
        # A second call without an apply returns the same slot.
        index = min(free, key=lambda each: (each not in self._lent, each))
        me, lent = threading.current_thread(), self._lent.get(index)
        if lent and lent.thread is me and lent.array.shape == shape:
            return lent.array
        self.take_back(index)
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
