"""Admission by the agent of the host's node, for ranks that need help.

These are the ranks of other nodes; with Open MPI, also those of the host's node.

A rank alone needs a compare-and-swap on STATE for each value that it may have by now, a
mark, a counter and its record, each an operation over the network. The agent has the
words on its own node, so that the rank needs one message and its answer. It makes the
same changes in the same order.

A short gradient of another node is part of the message. The agent keeps a copy, and
need not ask for the gradient when the round is reduced.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from hpcaccum.accumulator.receipts import Receipt
from hpcaccum.accumulator.state import Record
from hpcaccum.mpi import Attempt
from hpcaccum.nodes import Calls

if TYPE_CHECKING:
    from hpcaccum.accumulator.protocol import AdmissionProtocol
    from hpcaccum.accumulator.state import State
    from hpcaccum.accumulator.storage import Slots
    from hpcaccum.mpi import Group


class AdmissionAnswer(NamedTuple):
    """What became of a gradient.

    Attributes:
        accepted: None if it can be neither admitted nor dropped at the moment.
        step: The step when it arrived.
        parity: Of the open round.
        before: The word of the record that its rank had in the round, 0 if none.
        record: The word of the record that it has now.
    """

    accepted: bool | None
    step: int
    parity: int
    before: int
    record: int

    @property
    def held(self) -> Record | None:
        """The record that its rank had in the round; None if it had none."""
        return Record.of(self.before) if self.before else None

    @property
    def complete(self) -> bool:
        """Whether it was admitted, is in place and counted."""
        return bool(self.accepted) and not Record.of(self.record).writing

    def receipt(self, local_step: int) -> Receipt:
        """Return the receipt."""
        return Receipt(bool(self.accepted), local_step, self.step)


class RemoteAdmission(Calls):
    """Has an agent admit gradients, all of one shape, for a `Writer`. Collective.

    Args:
        group: The ranks, on several nodes.
        protocol: Has the words.
        storage: Has the buffers.
        what: Name for messages.
    """

    def __init__(
        self, group: Group, protocol: AdmissionProtocol, storage: Slots, what: str
    ) -> None:
        self._protocol, self._storage = protocol, storage
        # Of the agent.
        self._attempt = Attempt()
        # Last: other ranks may call at once.
        super().__init__(group, protocol.words.root, self._admit, f"{what}: apply_grad")

    def admit(
        self,
        local_step: int,
        only: int | None,
        fresh: tuple[int, int],
        placed: int | None,
    ) -> AdmissionAnswer:
        """Admit a gradient to the open round, or drop it. `forget` comes first."""
        words, contents = self._protocol.words, None
        if placed is not None and not words.near:
            contents = self._storage.short(placed)
        # The answer may lead other ranks to what is in the buffer.
        words.sync()
        return AdmissionAnswer(*self.call(local_step, only, fresh, contents))

    def settled(self) -> AdmissionAnswer | None:
        """Return what `admit` returned, or was about to; None if nothing was sent."""
        answer = self.settle()
        return None if answer is None else AdmissionAnswer(*answer)

    # The agent

    def _admit(
        self,
        rank: int,
        local_step: int,
        only: int | None,
        fresh: tuple[int, int],
        contents: bytes | None,
    ) -> tuple[bool | None, int, int, int, int]:
        protocol = self._protocol
        while True:
            state = protocol.state()
            step, parity = state.step, state.parity
            if local_step < step:
                protocol.counters.count_for(rank, Receipt(False, local_step, step))
                return False, step, parity, 0, 0
            index = protocol.record_index(parity, rank)
            # Only the rank writes it, and a take before the round is open.
            before = protocol.words.read(index)
            if self._has_no_room(state, only) or not (before or fresh[parity]):
                return None, step, parity, before, 0
            if protocol.swap(state, state.admitted(0), self._attempt):
                break
        record = Record.of(before or fresh[parity])
        if before:
            record = record._replace(writing=1)
        elif contents is not None:
            self._storage.keep(rank, record.buffer, contents)
            record = record._replace(copied=1)
        # First: a gradient that was taken is in the counts.
        if not record.writing:
            protocol.counters.count_for(rank, Receipt(True, local_step, step))
        protocol.words.write(index, word := record.word())
        return True, step, parity, before, word

    def _has_no_room(self, state: State, only: int | None) -> bool:
        return self._protocol.is_full(state) or only not in (None, state.parity)
