"""Admission by the agent of the host's node, for ranks that need help.

These are the ranks of other nodes; with Open MPI, also those of the host's node.

A rank alone needs a compare-and-swap on STATE for each value that it may have by now,
its intent, a counter and its record, each an operation over the network. The agent has
the words on its own node, so that the rank needs one message and its answer. It makes
the same changes in the same order.

A short gradient of another node is part of the message. The agent keeps a copy, and
need not ask for the gradient when the round is reduced.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from hpcaccum.accumulator.receipts import Receipt
from hpcaccum.accumulator.state import Record, admits
from hpcaccum.nodes import Calls
from hpcaccum.spans import traced

if TYPE_CHECKING:
    from hpcaccum.accumulator.protocol import AdmissionProtocol
    from hpcaccum.accumulator.state import State
    from hpcaccum.accumulator.storage import Slots
    from hpcaccum.mpi import Group


# A buffer, and whether the gradient is in it already.
Fresh = tuple[int, bool]


class AdmissionAnswer(NamedTuple):
    """What became of a gradient.

    Attributes:
        accepted: None if it can be neither admitted nor dropped at the moment.
        step: The step when it arrived.
        parity: Of the open round.
        before: The word of the record that its rank had in the round, 0 if none.
        record: The word of the record that it has, once the gradient is in place.
        complete: Whether it was admitted, is in place and counted. If it was admitted
            and is not in place, its rank still has an open intent.
    """

    accepted: bool | None
    step: int
    parity: int
    before: int
    record: int
    complete: bool

    @property
    def held(self) -> Record | None:
        """The record that its rank had in the round; None if it had none."""
        return Record.of(self.before) if self.before else None

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
        # Last: other ranks may call at once.
        super().__init__(group, protocol.words.root, self._admit, f"{what}: apply_grad")

    @traced("admission", lambda args, answer: answer.receipt(args[1]).shown())
    def admit(
        self,
        local_step: int,
        only: int | None,
        fresh: tuple[Fresh | None, Fresh | None],
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
        fresh: tuple[Fresh | None, Fresh | None],
        contents: bytes | None,
    ) -> tuple[bool | None, int, int, int, int, bool]:
        protocol = self._protocol
        while True:
            state = protocol.state()
            step, parity = state.step, state.parity
            if not admits(step, local_step):
                protocol.counters.count_for(rank, Receipt(False, local_step, step))
                return False, step, parity, 0, 0, False
            index = protocol.record_index(parity, rank)
            # Only the rank writes it, and a take before the round is open.
            before, place = protocol.words.read(index), fresh[parity]
            if self._has_no_room(state, only) or not (before or place):
                return None, step, parity, before, 0, False
            protocol.intend_for(rank, parity)
            if protocol.swap(state, state.admitted(0)):
                break
            protocol.end_intent_for(rank, parity)
        if before:
            held = Record.of(before)
            protocol.words.write(index, held._replace(adding=1).word())
            return True, step, parity, before, held.written().word(), False
        assert place is not None
        buffer, there = place
        record = Record(buffer, 1, 0, 0)
        if not there:
            return True, step, parity, 0, record.word(), False
        if contents is not None:
            self._storage.keep(rank, buffer, contents)
            record = record._replace(copied=1)
        # First: a gradient that was taken is in the counts.
        protocol.counters.count_for(rank, Receipt(True, local_step, step))
        protocol.words.write(index, word := record.word())
        protocol.end_intent_for(rank, parity)
        return True, step, parity, 0, word, True

    def _has_no_room(self, state: State, only: int | None) -> bool:
        return self._protocol.is_full(state) or only not in (None, state.parity)
