"""Takes: close a round, wait for its writers, reduce it, and make room for the next.

A `Take` closes a round when it is looked at again and again. A rank of the host's node
does that in `Take.wait`; for a rank of another node, the agent of the host's node does:
see `host_calls`.
"""

from __future__ import annotations

import math

from hpcaccum.accumulator.protocol import CLOSED, MEMBERS, STATE, AdmissionProtocol
from hpcaccum.accumulator.state import Closed, Record, State
from hpcaccum.accumulator.storage import Storage
from hpcaccum.deadline import Deadline
from hpcaccum.errors import EverybodyLeftError, WaitTimeoutError, format_ranks
from hpcaccum.nodes import Calls
from hpcaccum.spans import traced

# Seconds that a take with ``at_least`` has for admitted writers after its limit. It has
# closed the round by then, and they copy one gradient each.
_WRITING = 0.5


class Take:
    """One take of a rank, which has no other one; on the host's node.

    Args:
        protocol, storage, rank: Of the accumulator; the rank.
        required, at_least, empty: See `SharedAccumulator.hold_round`.
        calls: Of the agent of this node, if there is one, for `wait`.

    Attributes:
        closed: The round, when all that is in it has arrived; None before.
    """

    def __init__(
        self,
        protocol: AdmissionProtocol,
        storage: Storage,
        rank: int,
        required: int,
        at_least: int | None = None,
        empty: bool = False,
        calls: Calls | None = None,
    ) -> None:
        self._protocol, self._storage, self._rank = protocol, storage, rank
        self._calls = calls
        self._required, self._at_least, self._empty = required, at_least, empty
        self._lock, self._ticket, self._has_turn = protocol.take_lock, 0, False
        # While writers are to close the round: how it will be closed, how often ranks
        # had left before, and the words at the last look.
        self._request: State | None = None
        self._changes, self._seen = 0, list[int]()
        # The round as it was when it closed.
        self._closing: State | None = None
        self.closed: Closed | None = None

    @traced("take")
    def wait(self, deadline: Deadline) -> Closed:
        """Wait until the round is closed; return it."""
        try:
            if self._calls is None:
                return deadline.wait(self.look, self.missing)
            looks = self.look, self.may_go_on
            return self._calls.wait(*looks, deadline, self.missing)
        except WaitTimeoutError:
            if (late := self.expire(deadline)) is None:
                raise
        return late.wait(self.look, self.missing)

    def look(self) -> Closed | None:
        """Go on; return the round once it is closed and complete."""
        if not self._has_turn:
            self._ticket = self._ticket or self._lock.draw(self._rank)
            self._has_turn = not self._lock.before(self._rank, self._ticket)
        while self._has_turn:
            self._closing = self._closing or self._close()
            if self._closing is None:
                return None
            self.closed = self._arrived(self._closing)
            if self.closed is None or self.closed.count or self._empty:
                return self.closed
            # All of it was lost.
            self.complete()
            self._closing = self.closed = None
        return None

    def may_go_on(self) -> bool:
        """Whether the next look finds more; the thread of an agent may call it."""
        if not self._has_turn:
            return not self._lock.before(self._rank, self._ticket)
        if self._closing is not None:
            return self._arrived(self._closing) is not None
        memory, state = self._protocol.words.memory, self._protocol.packing.unpack
        assert self._request is not None
        is_open = state(memory[STATE]).parity == self._request.parity
        return not is_open or memory[MEMBERS] != self._changes

    def missing(self) -> str:
        """Return what it waits for, for messages."""
        if not self._has_turn:
            before = self._lock.before(self._rank, self._ticket)
            return f"{format_ranks(before)}, ahead of this rank"
        if self._closing is not None:
            return self._protocol.unfinished(self._closing.parity)
        assert self._request is not None
        return self._protocol.missing(self._request.number)

    def expire(self, deadline: Deadline) -> Deadline | None:
        """Wait for no more gradients; return the limit of the next looks, if any."""
        if self._request is not None and not self._withdraw():
            if self._at_least is None:
                return None
            number, least = self._protocol.state().number, self._at_least
            members = self._protocol.membership
            if number < members.quorum(least, members.changes()):
                return None
            self._required = least
        elif self._closing is None:
            # Another take has its turn.
            return None
        # It looks once more at least.
        return deadline if self._at_least is None else Deadline(_WRITING, deadline.what)

    def complete(self) -> None:
        """Make room for the next round, when this one is reduced, or lost."""
        protocol, closed = self._protocol, self.closed
        assert closed is not None
        step, number = closed.step, closed.number
        # Another take may have completed this one.
        protocol.membership.check_counts(self._rank)
        # From now on no other take reduces it.
        protocol.words.memory[CLOSED] |= protocol.packing.waiting
        if closed.count < number:
            protocol.add_lost(number - closed.count)
        if not (closed.count or self._empty):
            # Another round gets its step, unless the step was set since.
            while (state := protocol.state()).step == step + 1:
                if protocol.swap(state, state._replace(step=step)):
                    break
        self._clear(closed)

    def leave(self, *, withdraws: bool = True) -> None:
        """Pass the turn on, or leave the line; first withdraw a request."""
        if withdraws and self._request is not None:
            self._withdraw()
        self._lock.leave(self._rank)

    # Closing

    def _close(self) -> State | None:
        """Return a round that is closed, as it was; None: not yet."""
        protocol, words = self._protocol, self._protocol.words
        packing = protocol.packing
        is_new = self._request is None
        if is_new and words.memory[CLOSED] and (closing := self._resume()) is not None:
            return closing
        while self._request is None or not self._is_open():
            # A rank may have left; then the quorum is another one.
            if self._request is not None and self._withdraw():
                return self._closing
            found = words.read_range(STATE, MEMBERS + 1)
            word, self._changes = found[STATE], found[MEMBERS]
            state = packing.unpack(word)
            wanted = protocol.membership.quorum(self._required, self._changes)
            # What is recorded before the swap, another take can complete.
            if state.number >= wanted:
                protocol.put_closing(word)
                new = packing.pack(state.closed())
                if words.compare_and_swap(STATE, word, new) == word:
                    return state
                continue
            # Writers close it.
            closing = state._replace(number=wanted)
            protocol.put_closing(packing.pack(closing))
            protocol.announce(wanted)
            missing = wanted - state.number
            if protocol.swap(state, state._replace(waiting=1, number=missing)):
                self._request, self._seen = closing, []
        return None

    def _resume(self) -> State | None:
        """Return the round that an earlier take has closed and not reduced, if any."""
        closing, state = self._protocol.closing(), self._protocol.state()
        assert closing is not None
        is_open = state.parity == closing.parity
        # Unless it is closed before its request is withdrawn.
        if is_open and not (state.waiting and self._stop_waiting(closing)):
            return None
        if closing.waiting:
            self._clear(self._found(closing))
            return None
        return closing

    def _is_open(self) -> bool:
        """Whether writers may still close the round, and no rank has left since."""
        protocol, request = self._protocol, self._request
        words = protocol.words.read_range(STATE, MEMBERS + 1)
        if words == self._seen:
            return True
        self._seen, changes = words, words[MEMBERS]
        assert request is not None
        if protocol.packing.unpack(words[STATE]).parity != request.parity:
            return False
        members = protocol.membership
        if members.all_left(changes):
            # Only a STATE that is read after that has all of their gradients.
            now = protocol.state()
            if (now.parity, now.number) == (request.parity, request.number):
                raise EverybodyLeftError(
                    f"{protocol.what}: all {members.workers} ranks have left and the "
                    f"round has no gradient"
                )
        return changes == self._changes

    def _withdraw(self) -> bool:
        """End the request; return whether the round was closed nevertheless."""
        request, self._request = self._request, None
        assert request is not None
        if closed := self._stop_waiting(request):
            self._closing = request
        return closed

    def _stop_waiting(self, request: State) -> bool:
        while True:
            state = self._protocol.state()
            if state.parity != request.parity:
                return True
            number = request.number - state.number
            if self._protocol.swap(state, state._replace(waiting=0, number=number)):
                return False

    # Completing

    def _arrived(self, closing: State) -> Closed | None:
        """Return the round once all that were admitted have written, or are lost."""
        found = self._found(closing)
        if found.count == closing.number:
            return found
        # In this order: what has arrived is final when no intent is open.
        if self._protocol.open_intents(closing.parity):
            return None
        return self._found(closing)

    def _found(self, closing: State) -> Closed:
        """Return what of a round has arrived, without what lies on lost nodes."""
        step, _, parity, _, number = closing
        records = self._protocol.read_records(parity)
        lost = self._storage.lost(records)
        full: dict[int, Record] = {}
        count, weight, shape = 0, 0.0, 0
        for rank, record in records.items():
            if record.adding and not self._protocol.apart:
                # Part of a gradient is in the sum of all.
                return Closed(step, parity, number)
            if record.number and not record.adding and rank not in lost:
                full[rank], shape = record, max(shape, record.shape)
                count, weight = count + record.number, weight + record.weight
        divisor = weight if full and self._protocol.mean else 1.0
        shapes = self._protocol.shapes
        of_round = (shapes.only or shapes.shape(shape)) if full else ()
        return Closed(step, parity, number, count, weight, divisor, of_round, full)

    def _clear(self, closed: Closed) -> None:
        """Make room for the next round of this parity."""
        size = math.prod(closed.shape) if closed.count else None
        self._storage.clear(closed.parity, size)
        # Before the turn is passed on: the next take may open this parity again.
        self._protocol.clear_records(closed.parity)
        self._protocol.words.memory[CLOSED] = 0
