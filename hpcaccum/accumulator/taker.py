"""Takes: close a round, wait for its writers, reduce it, and make room for the next.

A take is a generator of its waits. A rank of the host's node runs it alone; for a rank
of another node, the agent of the host's node does: see `host_calls`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from hpcaccum.accumulator.one_thread import OneThread
from hpcaccum.accumulator.protocol import MEMBERS, STATE
from hpcaccum.accumulator.settings import size_of
from hpcaccum.accumulator.state import Closed, State
from hpcaccum.deadline import Deadline
from hpcaccum.errors import EverybodyLeftError, WaitTimeoutError, format_ranks
from hpcaccum.nodes import LostNodeError
from hpcaccum.spans import traced

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hpcaccum.accumulator.protocol import AdmissionProtocol
    from hpcaccum.accumulator.storage import Storage
    from hpcaccum.nodes import Calls

T = TypeVar("T")

# Seconds that a take with ``at_least`` has for admitted writers after its limit. It has
# closed the round by then, and they copy one gradient each.
_WRITING = 0.5


class Wait(NamedTuple):
    """A wait of a take.

    Attributes:
        look: Returns what ends it; None: nothing yet.
        missing: Returns what is waited for, for messages.
        changed: Returns whether another look may find it, as `Calls.wait` needs; None
            if it is not a long wait.
        seconds: Those that it has at least, also after the time limit.
    """

    look: Callable[[], Any]
    missing: Callable[[], str]
    changed: Callable[[], bool] | None = None
    seconds: float = 0.0


# Waits, each of which is sent what has ended it, or raises; and a result.
Waits = Generator[Wait, Any, T]


class Taker:
    """The takes of an accumulator.

    Attributes:
        inside: Lets one thread of a rank take at a time.
        calls: Those of the agent of the host's node; None if there is one node.
    """

    def __init__(
        self, protocol: AdmissionProtocol, storage: Storage, rank: int, what: str
    ) -> None:
        self._protocol, self._storage, self._what = protocol, storage, what
        self._lock, self._rank = protocol.take_lock, rank
        self.inside = OneThread(what)
        self.calls: Calls | None = None

    def take(
        self,
        required: int,
        at_least: int | None,
        deadline: Deadline,
        reduce: Callable[[Closed], T],
    ) -> T:
        """Do as `hold_round`, and return the reduction of its gradients, at least one.

        ``reduce`` is called with the round; again, with what is left, if a node is
        lost.
        """
        while True:
            # If a node with gradients of the round is lost, the others are taken.
            with (
                contextlib.suppress(LostNodeError),
                self.hold_round(required, deadline, at_least=at_least) as closed,
            ):
                return reduce(closed)

    @contextlib.contextmanager
    def hold_round(
        self,
        required: int,
        deadline: Deadline,
        *,
        at_least: int | None = None,
        empty: bool = False,
    ) -> Iterator[Closed]:
        """Close a round of ``required`` gradients or more, and hold it for a block.

        For ranks of the host's node. If the block raises, or the admitted writers do
        not finish in time, the round stays on record and the next take resumes it.
        ``at_least`` gradients suffice when the limit passes. A round of which all
        gradients were lost is held if ``empty``; else another is closed at its step.

        Raises:
            WaitTimeoutError: Names what is missing.
            EverybodyLeftError: If all ranks have left and no gradient is in the round.
        """
        with self.inside.hold("take_grad", deadline):
            try:
                waits = self.close(required, at_least, empty=empty)
                closed = self._take_round(waits, deadline)
                yield closed
                self.complete(self._rank, closed)
            finally:
                self._lock.leave(self._rank)

    @traced("take")
    def _take_round(self, waits: Waits[Closed], deadline: Deadline) -> Closed:
        self._run(self.turn(self._rank), deadline)
        return self._run(waits, deadline)

    def _run(self, waits: Waits[T], deadline: Deadline) -> T:
        """Wait each time; return the result."""
        proceed: Callable[[Any], Wait] = waits.send
        found: Any = None
        while True:
            try:
                wait = proceed(found)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]
            try:
                proceed, found = waits.send, self._wait(wait, deadline)
            except BaseException as error:
                proceed, found = waits.throw, error

    def _wait(self, wait: Wait, deadline: Deadline) -> Any:
        """Wait; return what has ended the wait."""
        look, missing, changed, seconds = wait
        if seconds > deadline.remaining:
            deadline = Deadline(seconds, deadline.what)
        if self.calls is None or changed is None:
            return deadline.wait(look, missing)
        return self.calls.wait(look, changed, deadline, missing, soon=False)

    # On the host's node

    def turn(self, rank: int) -> Waits[None]:
        """Wait for the turn of a rank, which `TicketLock.leave` passes on."""
        lock, ticket = self._lock, self._lock.draw(rank)
        if lock.before(rank, ticket):
            yield Wait(
                lambda: None if lock.before(rank, ticket) else True,
                lambda: (
                    f"{format_ranks(lock.before(rank, ticket))}, ahead of this rank"
                ),
            )

    def close(
        self, required: int, at_least: int | None, *, empty: bool = False
    ) -> Waits[Closed]:
        """Close a round for a rank that has its turn; return what has arrived of it."""
        seconds = 0.0 if at_least is None else _WRITING
        while True:
            closing = self._resume() or (yield from self._close(required, at_least))
            closed = yield from self._await_writers(closing, seconds)
            if closed.count or empty:
                return closed
            self._end(closed)
            self._step_back(closed)
            self._clear(closed)

    def complete(self, rank: int, closed: Closed) -> None:
        """Make room for the next round, when one is reduced; its rank has its turn."""
        # Another take may have completed this one.
        self._protocol.membership.check_counts(rank)
        self._end(closed)
        self._clear(closed)

    def _end(self, closed: Closed) -> None:
        """Record that no other take reduces a round."""
        step, parity, number = closed.step, closed.parity, closed.number
        self._protocol.put_closing(State(step, 0, parity, 1, number))
        self._protocol.add_lost(number - closed.count)

    # Closing

    def _resume(self) -> State | None:
        """Return the round that an earlier take has closed and not reduced, if any."""
        if (closing := self._protocol.closing()) is None:
            return None
        state, parity = self._protocol.state(), closing.parity
        if state.parity == parity:
            # It is still open, unless it is closed before its request is withdrawn.
            if not state.waiting:
                return None
            if not self._withdraw_request(parity, closing.number):
                return None
        if closing.waiting:
            self._clear(self._found(closing))
            return None
        return closing

    def _close(self, required: int, at_least: int | None) -> Waits[State]:
        """Return a closed round, as it was when it closed."""
        protocol, members = self._protocol, self._protocol.membership

        def quorum(number: int) -> int:
            return members.quorum(number, members.num_left(changes))

        while True:
            changes = members.changes()
            wanted, state = quorum(required), protocol.state()
            closing = state._replace(number=max(wanted, state.number), waiting=0)
            # Before the swap, so that another take can complete this one.
            protocol.put_closing(closing)
            if state.number >= wanted:
                if protocol.swap(state, state.closed()):
                    return closing
                continue
            try:
                if (yield from self._request(state, wanted, changes)):
                    return closing
            except WaitTimeoutError:
                if at_least is None or protocol.state().number < quorum(at_least):
                    raise
                required = at_least

    def _request(self, state: State, wanted: int, changes: int) -> Waits[bool]:
        """Have writers close the round at ``wanted`` gradients; return if they did.

        The round may have changed before the request, or a rank may leave meanwhile.
        """
        self._protocol.announce(wanted)
        request = state._replace(waiting=1, number=wanted - state.number)
        if not self._protocol.swap(state, request):
            return False
        try:
            closed = yield self._await_close(state.parity, wanted, changes)
        except WaitTimeoutError:
            if self._withdraw_request(state.parity, wanted):
                return True
            raise
        except GeneratorExit:
            # Its rank is dead: the next take withdraws the request.
            raise
        except BaseException:
            self._withdraw_request(state.parity, wanted)
            raise
        return closed or self._withdraw_request(state.parity, wanted)

    def _await_close(self, parity: int, wanted: int, changes: int) -> Wait:
        """Return the wait for the requested round; False ends it if a rank left."""
        protocol, seen = self._protocol, list[int]()

        def closed() -> bool | None:
            words = protocol.words.read_range(STATE, MEMBERS + 1)
            if words == seen:
                return None
            seen[:] = words
            if protocol.packing.unpack(words[STATE]).parity != parity:
                return True
            members = protocol.membership
            if members.all_left(words[MEMBERS]):
                # Only a STATE that is read after that has all of their gradients.
                now = protocol.state()
                if now.parity == parity and now.number == wanted:
                    raise EverybodyLeftError(
                        f"{self._what}: all {members.workers} ranks have left and the "
                        f"round has no gradient"
                    )
            return False if words[MEMBERS] != changes else None

        def missing() -> str:
            return protocol.missing(wanted)

        return Wait(closed, missing, protocol.changed(parity, changes))

    def _withdraw_request(self, parity: int, wanted: int) -> bool:
        """Stop waiting; return True if the round was closed nevertheless."""
        while True:
            state = self._protocol.state()
            if state.parity != parity:
                return True
            if self._protocol.swap(state, state.not_waiting(wanted)):
                return False

    # Completing

    def _await_writers(self, closing: State, seconds: float) -> Waits[Closed]:
        """Return the round once all that were admitted have written, or are lost."""

        def complete() -> Closed | None:
            found = self._found(closing)
            if found.count == closing.number:
                return found
            # In this order: what has arrived is final when no intent is open.
            if self._protocol.open_intents(closing.parity):
                return None
            return self._found(closing)

        found = complete()
        if found is None:
            unfinished = self._protocol.unfinished
            missing = functools.partial(unfinished, closing.parity)
            found = yield Wait(complete, missing, seconds=seconds)
        assert found is not None
        return found

    def _found(self, closing: State) -> Closed:
        """Return what of a round has arrived, without what lies on lost nodes."""
        records = self._protocol.read_records(closing.parity)
        adding = any(record.adding for record in records.values())
        if adding and not self._protocol.apart:
            # Part of a gradient is in the sum of all.
            records = {}
        full = {
            rank: record
            for rank, record in records.items()
            if record.number and not record.adding and not self._storage.is_lost(rank)
        }
        count = sum(record.number for record in full.values())
        shape = max((record.shape for record in full.values()), default=0)
        step, _, parity, _, number = closing
        return Closed(step, parity, number, count, shape, full)

    def _clear(self, closed: Closed) -> None:
        """Make room for the next round of this parity."""
        size = None
        if closed.count:
            size = size_of(self._protocol.shapes.shape(closed.shape))
        self._storage.clear(closed.parity, size)
        # Before the turn is passed on: the next take may open this parity again.
        self._protocol.clear_records(closed.parity)
        self._protocol.end_closing()

    def _step_back(self, closed: Closed) -> None:
        """Undo the step of a round without gradients, unless it was set since."""
        while (state := self._protocol.state()).step == closed.step + 1:
            if self._protocol.swap(state, state._replace(step=closed.step)):
                return
