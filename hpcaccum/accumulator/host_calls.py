"""Admission and takes for ranks of other nodes, by the agent of the host's node.

The agent has the words on its own node, and calls the functions that a rank of its node
calls; docs/architecture.md, "The calls", says what the messages are. A rank that waits
for a take has the time limit, and may be interrupted. Then it has the agent end the
take.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Generator
from typing import Any

from hpcaccum.accumulator.protocol import AdmissionProtocol, Admitted, Request
from hpcaccum.accumulator.state import Closed
from hpcaccum.accumulator.storage import Storage
from hpcaccum.accumulator.take import Take
from hpcaccum.deadline import Deadline, grace
from hpcaccum.errors import EverybodyLeftError, WaitTimeoutError
from hpcaccum.mpi import Group
from hpcaccum.nodes import Call, Calls, Steps
from hpcaccum.spans import traced


class HostCalls(Calls):
    """Calls of the agent of the host's node, for one accumulator. Collective."""

    def __init__(
        self,
        group: Group,
        protocol: AdmissionProtocol,
        storage: Storage,
        what: str,
    ) -> None:
        self._protocol, self._storage = protocol, storage
        # The end of this rank's last take, if its answer has not come.
        self.leaving: Call | None = None
        # On the agent, by rank: its take, until it has ended.
        self._takes: dict[int, Take] = {}
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
        contents = self._storage.short(self._storage.buffer(admitted.record.buffer))
        self._protocol.words.sync()
        return self.begin("arrive", admitted, contents)

    def abandon(self, admitted: Admitted) -> Call:
        """Begin to publish that a gradient does not come."""
        left_out = Admitted(None, admitted.parity, record=admitted.before)
        return self.begin("arrive", left_out, None)

    # The agent

    def _serve(self, rank: int, kind: str, *arguments: Any) -> Any:
        return getattr(self, f"_{kind}")(rank, *arguments)

    def _admit(self, rank: int, *parts: Any) -> Admitted:
        request = Request(*parts)
        admitted = self._protocol.admit(rank, request)
        if admitted.complete:
            assert admitted.record is not None
            if request.contents is not None:
                self._storage.keep(rank, admitted.record.buffer, request.contents)
            self._protocol.arrive(rank, admitted)
        return admitted

    def _arrive(self, rank: int, admitted: Admitted, contents: bytes | None) -> None:
        record = admitted.record
        if contents is not None and record is not None:
            self._storage.keep(rank, record.buffer, contents)
            admitted = admitted._replace(record=record._replace(copied=1))
        self._protocol.arrive(rank, admitted)

    def _take(
        self, rank: int, required: int, at_least: int | None
    ) -> Generator[bool, None, Closed]:
        take = Take(self._protocol, self._storage, rank, required, at_least)
        self._takes[rank], late = take, None
        try:
            while (closed := take.look()) is None:
                if rank in self._given_up and (late is None or late.expired):
                    limit = Deadline(0, self.what)
                    late = take.expire(limit) if late is None else None
                    if late is None:
                        text = f"rank {rank} does not wait any more"
                        raise WaitTimeoutError(f"{self.what}: {text}")
                    continue
                yield False
                # No later step of it comes after this.
                self._protocol.membership.check_counts(rank)
        except BaseException as error:
            del self._takes[rank]
            # The next take withdraws the request of one whose rank is dead.
            take.leave(withdraws=isinstance(error, WaitTimeoutError))
            raise
        total = self._storage.short_total(closed)
        return dataclasses.replace(closed, total=total)

    def _missing(self, rank: int) -> str:
        take = self._takes.get(rank)
        return self.missing() if take is None else take.missing()

    def _give_up(self, rank: int) -> Steps:
        """Have a take of a rank end at its next wait."""
        self._given_up.add(rank)
        while rank in self._takes and self._takes[rank].closed is None:
            yield False
        self._given_up.discard(rank)

    def _leave(self, rank: int) -> Steps:
        """End a take of a rank."""
        yield from self._give_up(rank)
        self._takes.pop(rank, None)
        self._protocol.take_lock.leave(rank)

    def _complete(self, rank: int) -> None:
        take = self._takes.pop(rank)
        take.complete()
        take.leave()

    def _lose(self, _: int, rank: int) -> None:
        self._protocol.membership.lose_rank(rank)


class FarTake:
    """A take of this rank by the agent of another node; used as a `Take`."""

    def __init__(self, calls: HostCalls, required: int, at_least: int | None) -> None:
        self._calls, self._wanted = calls, (required, at_least)
        # How it is to end, if it has begun.
        self._end: str | None = None

    @traced("take")
    def wait(self, deadline: Deadline) -> Closed:
        """Wait until the round is closed; return it."""
        calls = self._calls
        if calls.leaving is not None:
            calls.leaving.result(deadline, calls.missing)
            calls.leaving = None
        self._end = "leave"
        call = calls.begin("take", *self._wanted)
        try:
            closed = call.result(deadline, lambda: str(calls.call("missing")))
        except WaitTimeoutError as error:
            if error is call.answer:
                raise
            if call.answer is None:
                calls.begin("give_up")
            try:
                # It may be closed nevertheless, or have been when the limit passed.
                closed = call.result(grace(calls.what))
            except EverybodyLeftError:
                raise
            except WaitTimeoutError:
                raise error from None
        return closed  # type: ignore[no-any-return]

    def complete(self) -> None:
        """Have `leave` make room for the next round: this one is reduced."""
        self._end = "complete"

    def leave(self) -> None:
        """Have the agent end the take; wait for a moment at most."""
        if self._end is None:
            return
        calls = self._calls
        call = calls.leaving = calls.begin(self._end)
        with contextlib.suppress(WaitTimeoutError):
            call.result(grace(calls.what))
            calls.leaving = None
