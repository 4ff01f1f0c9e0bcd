"""Takes: close a round, wait for its writers, reduce it, and make room for the next."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from hpcaccum.accumulator.protocol import MEMBERS, STATE
from hpcaccum.accumulator.shapes import size_of
from hpcaccum.accumulator.state import Closed
from hpcaccum.errors import EverybodyLeftError, WaitTimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hpcaccum.accumulator.protocol import AdmissionProtocol
    from hpcaccum.accumulator.remote_admission import RemoteAdmission
    from hpcaccum.accumulator.row_storage import Storage
    from hpcaccum.accumulator.state import State
    from hpcaccum.deadline import Deadline

T = TypeVar("T")


class Taker:
    """The takes of one rank; used by the handles of an accumulator.

    Args:
        protocol: Admits gradients; see there how a take that waits or fails behaves.
        storage: Where the gradients are.
        remote: Admits gradients for other ranks; None if no agent does.
        what: Name for messages.
    """

    def __init__(
        self,
        protocol: AdmissionProtocol,
        storage: Storage,
        remote: RemoteAdmission | None,
        what: str,
    ) -> None:
        self._protocol, self._storage, self._what = protocol, storage, what
        self._remote = remote
        # After an exception these say how far a take has come: the round that it means
        # to close, as it will be then; and what the round has once it is final.
        self._closing: State | None = None
        self._complete: Closed | None = None
        self._empty = False

    def take(
        self,
        required: int,
        deadline: Deadline,
        reduce: Callable[[Closed], T],
        *,
        empty: bool = False,
    ) -> T:
        """Close a round of ``required`` gradients or more; return their reduction.

        If it fails before the result is complete, or the admitted writers do not finish
        in time, the round stays on record and the next take resumes it.

        Args:
            required: Gradients to wait for.
            deadline: Of the call.
            reduce: Returns the reduction of a closed round. Its gradients stay as they
                are until it returns. If it raises, it may be called again with the same
                round.
            empty: Whether a round is reduced of which all gradients were given up. If
                not, another round is closed at its step.

        Raises:
            WaitTimeoutError: Names what is missing.
            EverybodyLeftError: If all ranks have left and no gradient is in the round.
            Exception: What ``reduce`` raises.
        """
        return self._protocol.take_lock.hold(
            deadline, lambda: self._take(required, deadline, reduce, empty)
        )

    def _take(
        self,
        required: int,
        deadline: Deadline,
        reduce: Callable[[Closed], T],
        empty: bool,
    ) -> T:
        self._closing = self._complete = None
        self._empty = empty
        try:
            while True:
                closing = self._close(required, deadline)
                closed = self._await_writers(closing, deadline)
                if closed.count or empty:
                    result = reduce(closed)
                self._complete = closed
                self._finish(closing, closed)
                if closed.count or empty:
                    return result
                # All of them were given up: there is nothing to return.
                self._closing = self._complete = None
        except BaseException:
            # A signal handler may raise again, and no other rank can do this.
            try:
                self._put_back()
            except BaseException:
                self._put_back()
                raise
            raise

    # Closing

    def _close(self, required: int, deadline: Deadline) -> State:
        """Return a closed round, as it was when it closed."""
        protocol, members = self._protocol, self._protocol.membership
        if closing := protocol.closed():
            self._closing = closing
            return closing
        while True:
            num_left = members.num_left()
            wanted = members.quorum(required, num_left)
            state = protocol.state()
            # Before the swap: an exception may hide whether it succeeded.
            self._closing = closing = state._replace(number=max(wanted, state.number))
            if state.number < wanted:
                if self._request(state, wanted, num_left, deadline):
                    return closing
            elif protocol.swap(state, state.closed()):
                return closing

    def _request(
        self, state: State, wanted: int, num_left: int, deadline: Deadline
    ) -> bool:
        """Have writers close the round at ``wanted`` gradients; wait until they do.

        Returns:
            False if the round changed before the request, or a rank left meanwhile.
        """
        self._protocol.announce(wanted)
        request = state._replace(waiting=1, number=wanted - state.number)
        if not self._protocol.swap(state, request):
            return False
        try:
            closed = self._await_close(state.parity, wanted, num_left, deadline)
        except WaitTimeoutError:
            if self._withdraw_request(state.parity, wanted):
                return True
            raise
        return closed or self._withdraw_request(state.parity, wanted)

    def _await_close(
        self, parity: int, wanted: int, num_left: int, deadline: Deadline
    ) -> bool:
        """Wait until the requested round is closed; return False if a rank left."""
        protocol, seen = self._protocol, list[int]()

        def closed() -> bool | None:
            words = protocol.words.read_range(STATE, MEMBERS + 1)
            if words == seen:
                return None
            seen[:] = words
            return self._is_requested_closed(words, parity, wanted, num_left)

        def missing() -> str:
            return protocol.missing(wanted)

        if self._remote is None:
            return deadline.wait(closed, missing)
        changed = protocol.changed(parity, num_left)
        return self._remote.wait(closed, changed, deadline, missing, soon=False)

    def _is_requested_closed(
        self, words: Sequence[int], parity: int, wanted: int, num_left: int
    ) -> bool | None:
        """Return whether the round is closed, False if a rank left; None: neither.

        Args:
            words: The first ones, as they are now.
            parity: Of the round.
            wanted: Gradients that the request requires.
            num_left: How many ranks had left before the request.
        """
        protocol = self._protocol
        now = protocol.packing.unpack(words[STATE])
        if now.parity != parity:
            return True
        if now.shape and now.number == wanted:
            # The gradient that had this shape was given up.
            protocol.swap(now, now._replace(shape=0))
        if protocol.membership.all_left(words[MEMBERS]):
            self._check_nonempty(parity, wanted)
        return False if words[MEMBERS] != num_left else None

    def _check_nonempty(self, parity: int, wanted: int) -> None:
        # Only a STATE that is read after all have left has all of their gradients.
        now = self._protocol.state()
        if now.parity == parity and now.number == wanted:
            raise EverybodyLeftError(
                f"{self._what}: all {self._protocol.membership.workers} ranks have "
                f"left and the round has no gradient"
            )

    def _withdraw_request(self, parity: int, wanted: int) -> bool:
        """Stop waiting; return True if the round was closed nevertheless."""
        while True:
            state = self._protocol.state()
            if state.parity != parity:
                return True
            if self._protocol.swap(state, state.not_waiting(wanted)):
                return False

    # Completing

    def _await_writers(self, closing: State, deadline: Deadline) -> Closed:
        """Return the round once all that were admitted have written, or given up."""

        def complete() -> Closed | None:
            records = self._protocol.read_records(closing.parity)
            given_up = sum(record.given_up for record in records.values())
            count = sum(record.number for record in records.values())
            if count + given_up != closing.number:
                return None
            full = {rank: record for rank, record in records.items() if record.number}
            shape = max((record.shape for record in full.values()), default=0)
            return Closed(closing.step, closing.parity, count, shape, full)

        return deadline.wait(
            complete, lambda: self._protocol.unfinished(closing.parity)
        )

    def _finish(self, closing: State, closed: Closed) -> None:
        """Make room for the next round of this parity. May be called twice."""
        if closed.count:
            shape = self._protocol.shapes.shape(closed.shape)
            self._storage.clear(closed.parity, size_of(shape))
        elif not self._empty:
            self._step_back(closing)
        # Before the turn is passed on: the next take may open this parity again.
        self._protocol.clear_records(closed.parity)
        self._protocol.put_closed(None)

    def _step_back(self, closing: State) -> None:
        """Undo the step of a round without gradients, unless it was set since."""
        while (state := self._protocol.state()).step == closing.step + 1:
            if self._protocol.swap(state, state._replace(step=closing.step)):
                return

    # After an exception. May be called twice.

    def _put_back(self) -> None:
        """Restore the state before the take, or complete it if it has its result."""
        self._protocol.words.settle()
        closing, complete = self._closing, self._complete
        if closing and complete:
            self._finish(closing, complete)
        elif closing and self._is_closed(closing):
            self._protocol.put_closed(closing)

    def _is_closed(self, closing: State) -> bool:
        """Return whether the take has closed its round; withdraw its request if not."""
        state = self._protocol.state()
        if state.parity == closing.parity and state.waiting:
            return self._withdraw_request(closing.parity, closing.number)
        return state.parity != closing.parity
