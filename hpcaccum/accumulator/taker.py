"""Takes: close a round, wait for its writers, reduce it, and make room for the next."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, TypeVar

from hpcaccum.accumulator.declared_shape import size_of
from hpcaccum.accumulator.protocol import MEMBERS, STATE
from hpcaccum.accumulator.state import Closed
from hpcaccum.errors import EverybodyLeftError, WaitTimeoutError
from hpcaccum.nodes import LostNodeError
from hpcaccum.spans import traced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hpcaccum.accumulator.protocol import AdmissionProtocol
    from hpcaccum.accumulator.remote_admission import RemoteAdmission
    from hpcaccum.accumulator.state import State
    from hpcaccum.accumulator.storage import Storage
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

    def take(
        self, required: int, deadline: Deadline, reduce: Callable[[Closed], T]
    ) -> T:
        """Do as `hold_round`, and return the reduction of its gradients, at least one.

        Args:
            required: See `hold_round`.
            deadline: Likewise.
            reduce: Called with the round; again, with what is left, if a node is lost.

        Raises:
            Exception: What ``reduce`` raises.
        """
        while True:
            # If a node with gradients of the round is lost, the others are taken.
            with (
                contextlib.suppress(LostNodeError),
                self.hold_round(required, deadline) as closed,
            ):
                if closed.count:
                    return reduce(closed)

    @contextlib.contextmanager
    def hold_round(
        self, required: int, deadline: Deadline, *, empty: bool = False
    ) -> Iterator[Closed]:
        """Close a round of ``required`` gradients or more, and keep it for a block.

        If the block raises, or the admitted writers do not finish in time, the round
        stays on record and the next take resumes it.

        Args:
            required: Gradients to wait for.
            deadline: Of the call.
            empty: Whether a round without gradients, because all were lost, makes a
                step, too. If not, the next round begins at its step.

        Raises:
            WaitTimeoutError: Names what is missing.
            EverybodyLeftError: If all ranks have left and no gradient is in the round.
        """
        with self._protocol.take_lock.hold("take_grad", deadline):
            closing, closed = self._take_round(required, deadline)
            yield closed
            # Another take may have completed this one.
            self._protocol.membership.check_counts()
            self._protocol.put_closing(closing, reduced=True)
            self._protocol.add_lost(closing.number - closed.count)
            if not closed.count and not empty:
                self._step_back(closing)
            self._clear(closed)

    @traced("take")
    def _take_round(self, required: int, deadline: Deadline) -> tuple[State, Closed]:
        """Return a round as it was when it closed, and what has arrived of it."""
        closing = self._resume() or self._close(required, deadline)
        return closing, self._await_writers(closing, deadline)

    # Closing

    def _resume(self) -> State | None:
        """Return the round that an earlier take has closed and not reduced, if any."""
        closing = self._protocol.closing()
        if closing is None or not self._is_closed(closing):
            return None
        if closing.waiting:
            self._clear(self._found(closing))
            return None
        return closing

    def _is_closed(self, closing: State) -> bool:
        """Return whether a take has closed its round; withdraw its request if not."""
        state = self._protocol.state()
        if state.parity == closing.parity and state.waiting:
            return self._withdraw_request(closing.parity, closing.number)
        return state.parity != closing.parity

    def _close(self, required: int, deadline: Deadline) -> State:
        """Return a closed round, as it was when it closed."""
        protocol, members = self._protocol, self._protocol.membership
        while True:
            changes = members.changes()
            wanted = members.quorum(required, members.num_left(changes))
            state = protocol.state()
            closing = state._replace(number=max(wanted, state.number), waiting=0)
            # Before the swap, so that another take can complete this one.
            protocol.put_closing(closing)
            if state.number < wanted:
                if self._request(state, wanted, changes, deadline):
                    return closing
            elif protocol.swap(state, state.closed()):
                return closing

    def _request(
        self, state: State, wanted: int, changes: int, deadline: Deadline
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
            closed = self._await_close(state.parity, wanted, changes, deadline)
        except WaitTimeoutError:
            if self._withdraw_request(state.parity, wanted):
                return True
            raise
        except BaseException:
            self._withdraw_request(state.parity, wanted)
            raise
        return closed or self._withdraw_request(state.parity, wanted)

    def _await_close(
        self, parity: int, wanted: int, changes: int, deadline: Deadline
    ) -> bool:
        """Wait until the requested round is closed; return False if a rank left."""
        protocol, seen = self._protocol, list[int]()

        def closed() -> bool | None:
            words = protocol.words.read_range(STATE, MEMBERS + 1)
            if words == seen:
                return None
            seen[:] = words
            if protocol.packing.unpack(words[STATE]).parity != parity:
                return True
            if protocol.membership.all_left(words[MEMBERS]):
                self._check_nonempty(parity, wanted)
            return False if words[MEMBERS] != changes else None

        def missing() -> str:
            return protocol.missing(wanted)

        if self._remote is None:
            return deadline.wait(closed, missing)
        changed = protocol.changed(parity, changes)
        return self._remote.wait(closed, changed, deadline, missing, soon=False)

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
        """Return the round once all that were admitted have written, or are lost."""

        def complete() -> Closed | None:
            found = self._found(closing)
            if found.count == closing.number:
                return found
            # In this order: what has arrived is final when no intent is open.
            if self._protocol.open_intents(closing.parity):
                return None
            return self._found(closing)

        return deadline.wait(
            complete, lambda: self._protocol.unfinished(closing.parity)
        )

    def _found(self, closing: State) -> Closed:
        """Return what of a round has arrived, and can be reached.

        Without sums that are none.
        """
        records = self._protocol.read_records(closing.parity)
        adding = any(record.adding for record in records.values())
        if adding and not self._storage.apart:
            # Part of a gradient is in the sum of all.
            records = {}
        full = {
            rank: record
            for rank, record in records.items()
            if record.number
            and not record.adding
            and not self._storage.is_lost(rank, record)
        }
        count = sum(record.number for record in full.values())
        shape = max((record.shape for record in full.values()), default=0)
        return Closed(closing.step, closing.parity, count, shape, full)

    def _clear(self, closed: Closed) -> None:
        """Make room for the next round of this parity."""
        size = None
        if closed.count:
            size = size_of(self._protocol.shapes.shape(closed.shape))
        self._storage.clear(closed.parity, size)
        # Before the turn is passed on: the next take may open this parity again.
        self._protocol.clear_records(closed.parity)
        self._protocol.end_closing()

    def _step_back(self, closing: State) -> None:
        """Undo the step of a round without gradients, unless it was set since."""
        while (state := self._protocol.state()).step == closing.step + 1:
            if self._protocol.swap(state, state._replace(step=closing.step)):
                return
