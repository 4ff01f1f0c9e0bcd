"""Admission and takes for ranks of other nodes, by the agent of the host's node.

The agent has the words on its own node, and calls the functions that a rank of its node
calls. So a rank needs one message and its answer for an admission, and for a take
another one when the round is reduced.

A short gradient is part of the message. The agent keeps a copy, and need not ask for
the gradient when the round is reduced. If it has all gradients of a round, and they are
short, the answer to a take has their sum.

A rank that waits for a take has the time limit, and may be interrupted. Then it has the
agent end the take.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any, TypeVar

from hpcaccum.accumulator.protocol import Request
from hpcaccum.accumulator.settings import size_of
from hpcaccum.deadline import Deadline, grace
from hpcaccum.errors import EverybodyLeftError, WaitTimeoutError
from hpcaccum.nodes import Calls, LostNodeError
from hpcaccum.spans import traced

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from hpcaccum.accumulator.protocol import AdmissionProtocol, Admitted
    from hpcaccum.accumulator.state import Closed
    from hpcaccum.accumulator.storage import Storage
    from hpcaccum.accumulator.taker import Taker, Wait, Waits
    from hpcaccum.mpi import Group
    from hpcaccum.nodes import Call

T = TypeVar("T")


class HostCalls(Calls):
    """Calls of the agent of the host's node, for one accumulator. Collective."""

    def __init__(
        self,
        group: Group,
        protocol: AdmissionProtocol,
        storage: Storage,
        taker: Taker,
        what: str,
    ) -> None:
        self._protocol, self._storage, self._taker = protocol, storage, taker
        # The end of the last take, if its answer has not come.
        self._leaving: Call | None = None
        # On the agent, by rank: what its take waits for, and what it has closed.
        self._waits: dict[int, Wait | None] = {}
        self._closed: dict[int, Closed] = {}
        # The ranks that want their takes to end.
        self._given_up: set[int] = set()
        # Last: other ranks may call at once.
        super().__init__(group, protocol.words.root, self._serve, what)

    # A rank of another node

    def admit(self, request: Request) -> Call:
        """Begin to have a gradient admitted: the result is that of the protocol's."""
        # The answer may lead other ranks to what is in the buffer.
        self._protocol.words.sync()
        # Its parts are shorter in a message.
        return self.begin("admit", *request)

    def arrive(self, admitted: Admitted) -> Call:
        """Begin to publish that a gradient is in place."""
        assert admitted.record is not None
        contents = self._storage.short(admitted.record.buffer)
        self._protocol.words.sync()
        return self.begin("arrive", admitted, contents)

    def abandon(self, admitted: Admitted) -> Call:
        """Begin to publish that a gradient does not come."""
        return self.begin("abandon", admitted)

    def take(
        self,
        required: int,
        at_least: int | None,
        deadline: Deadline,
        reduce: Callable[[Closed], T],
    ) -> T:
        """Do as `Taker.take`."""
        with self._taker.inside.hold("take_grad", deadline):
            if self._leaving is not None:
                self._leaving.result(deadline, self.missing)
                self._leaving = None
            again, end = False, "leave"
            try:
                while True:
                    closed = self._close(required, at_least, again, deadline)
                    try:
                        result = reduce(closed)
                    except LostNodeError:
                        # Again, without the gradients that were there.
                        again = True
                    else:
                        end = "complete"
                        return result
            finally:
                self._end_take(end)

    @traced("take")
    def _close(
        self, required: int, at_least: int | None, again: bool, deadline: Deadline
    ) -> Closed:
        """Return a closed round."""
        call = self.begin("take", required, at_least, again)
        try:
            closed = call.result(deadline, self._awaited)
        except WaitTimeoutError as error:
            if error is call.answer:
                raise
            if call.answer is None:
                self.begin("give_up")
            # It may be closed nevertheless, or have been when the limit passed.
            closed = self._last_answer(call)
            if closed is None:
                raise
        return closed  # type: ignore[no-any-return]

    def _last_answer(self, call: Call) -> Any:
        """Return the answer to a take that has been given up; None if it failed."""
        try:
            return call.result(grace(self.what))
        except EverybodyLeftError:
            raise
        except WaitTimeoutError:
            return None

    def _awaited(self) -> str:
        """Return what the take of this rank waits for, for messages."""
        return str(self.call("missing"))

    def _end_take(self, end: str) -> None:
        """End the take of this rank; wait for a moment at most."""
        self._leaving = self.begin(end)
        with contextlib.suppress(WaitTimeoutError):
            self._leaving.result(grace(self.what))
            self._leaving = None

    # The agent

    def _serve(self, rank: int, kind: str, *arguments: Any) -> Any:
        result = getattr(self, f"_{kind}")(rank, *arguments)
        return True if result is None else result

    def _admit(self, rank: int, *parts: Any) -> Admitted:
        request = Request(*parts)
        offer, contents = request.offer, request.contents
        assert offer is not None
        admitted = self._protocol.admit(rank, request, lambda: offer)
        if admitted.complete:
            assert admitted.record is not None
            if contents is not None:
                self._storage.keep(rank, admitted.record.buffer, contents)
            self._protocol.arrive(rank, admitted)
        return admitted

    def _arrive(self, rank: int, admitted: Admitted, contents: bytes | None) -> None:
        record = admitted.record
        if contents is not None and record is not None:
            self._storage.keep(rank, record.buffer, contents)
            admitted = admitted._replace(record=record._replace(copied=1))
        self._protocol.arrive(rank, admitted)

    def _abandon(self, rank: int, admitted: Admitted) -> None:
        self._protocol.abandon(rank, admitted)

    def _take(
        self, rank: int, required: int, at_least: int | None, again: bool
    ) -> Generator[bool, None, Closed]:
        self._waits[rank] = None
        waits = self._closing(rank, required, at_least, again)
        try:
            self._closed[rank] = yield from self._run(rank, waits)
        except BaseException:
            self._protocol.take_lock.leave(rank)
            raise
        finally:
            waits.close()
            del self._waits[rank]
        return self._closed[rank]

    def _closing(
        self, rank: int, required: int, at_least: int | None, again: bool
    ) -> Waits[Closed]:
        """Close a round for a rank, which has its turn if ``again``."""
        taker, storage, shapes = self._taker, self._storage, self._protocol.shapes
        if not again:
            yield from taker.turn(rank)
        closed = yield from taker.close(required, at_least)
        count = size_of(shapes.shape(closed.shape))
        return dataclasses.replace(closed, total=storage.short_total(closed, count))

    def _run(self, rank: int, waits: Waits[T]) -> Generator[bool, None, T]:
        """Run a take of a rank; yield while it waits."""
        proceed: Callable[[Any], Wait] = waits.send
        found: Any = None
        while True:
            try:
                wait = proceed(found)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]
            self._waits[rank] = wait
            least = Deadline(wait.seconds, self.what)
            try:
                while (found := wait.look()) is None:
                    if least.expired:
                        self._check_wanted(rank)
                    yield False
                    # No later step of it comes after this.
                    self._protocol.membership.check_counts(rank)
                proceed = waits.send
            except WaitTimeoutError as error:
                proceed, found = waits.throw, error

    def _check_wanted(self, rank: int) -> None:
        if rank in self._given_up:
            raise WaitTimeoutError(f"{self.what}: rank {rank} does not wait any more")

    def _missing(self, rank: int) -> str:
        wait = self._waits.get(rank)
        return self.missing() if wait is None else wait.missing()

    def _give_up(self, rank: int) -> Generator[bool, None, bool]:
        """Have a take of a rank end at its next wait."""
        self._given_up.add(rank)
        while rank in self._waits:
            yield False
        self._given_up.discard(rank)
        return True

    def _leave(self, rank: int) -> Generator[bool, None, bool]:
        """End a take of a rank."""
        yield from self._give_up(rank)
        self._closed.pop(rank, None)
        self._protocol.take_lock.leave(rank)
        return True

    def _complete(self, rank: int) -> None:
        self._taker.complete(rank, self._closed.pop(rank))
        self._protocol.take_lock.leave(rank)

    def _lose(self, _: int, rank: int) -> None:
        self._protocol.membership.lose_rank(rank)
