"""Collective exchanges of small objects, and checks that all ranks make the same call.

The ranks of a group make their collective calls in one order. A rank that leaves it
out of step would make the others wait, each for another call. So every call has a
name and a number: rank 0 collects what the others send, compares, and answers. A rank
that waits for long in a call of another kind (a `Track`: the reductions of a reducer)
reports that to rank 0 too. Two calls that wait for each other are then an error on
every rank that waits.

Messages of one rank arrive in the order in which they were sent, so a message that
rank 0 has received is known to be all that its sender had to say before the next one.
"""

from __future__ import annotations

import functools
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from hpcaccum.deadline import Deadline
from hpcaccum.errors import DisagreementError, WaitTimeoutError, format_ranks
from hpcaccum.mpi.runtime import MPI
from hpcaccum.mpi.shutdown import is_ending

if TYPE_CHECKING:
    from mpi4py import MPI as mpi4py_MPI

T = TypeVar("T")

_TAG = 1
# Seconds in another collective call after which a rank reports it to rank 0. A rank
# has at most one report under way, so they cost nothing where a rank is just slow.
_PATIENCE = 0.2
# Seconds for rank 0 to name the missing ranks, after the limit of another one.
_GRACE = 0.2


@dataclass
class Track:
    """Collective calls of one kind, which all ranks count.

    Attributes:
        number: Identifies the track in its group; the same on all ranks.
        what: For messages.
        calls: Calls that are complete on this rank.
        thread: The thread of this rank that made the last one.
    """

    number: int
    what: str
    calls: int = 0
    thread: int = field(default_factory=threading.get_ident)

    def __str__(self) -> str:
        """Name the call that comes next."""
        return f"{self.what} {self.calls + 1}"


class _Call(NamedTuple):
    """A rank has come to an exchange. ``passed``: complete calls, by track."""

    number: int
    what: str
    ending: bool
    value: Any
    passed: dict[int, int]

    def __str__(self) -> str:
        return self.what + (" (at the end of its program)" if self.ending else "")


class _Report(NamedTuple):
    """A rank waits in call ``number`` of a track; track 0 if it gave up."""

    track: int
    number: int
    what: str
    passed: dict[int, int]

    def __str__(self) -> str:
        return self.what


class _GaveUp(NamedTuple):
    """A rank waits no more for the answer to an exchange."""

    number: int
    reason: str


class _Answer(NamedTuple):
    """What all ranks brought to an exchange."""

    number: int
    values: list[Any]


class _Failure(NamedTuple):
    """No rank gets an answer to exchange ``number``, nor one of these tracks."""

    number: int
    tracks: tuple[int, ...]
    kind: type[Exception]
    text: str


class _Seen(NamedTuple):
    """Rank 0 has received a report; the next one may be sent."""


class ControlChannel:
    """The exchanges of one group, and its tracks. Used by its `Group`.

    Args:
        comm: The private communicator of the group.
    """

    def __init__(self, comm: mpi4py_MPI.Intracomm) -> None:
        self._comm, self._rank, self._size = comm, comm.rank, comm.size
        # The last exchange that this rank has come to, and the last one that is over.
        self._number = self._over = 0
        self._tracks: dict[int, Track] = {}
        self._made = 0
        # Several threads of a rank may wait, each in a call of its own.
        self._lock = threading.RLock()
        # What rank 0 has received last, by rank.
        self._calls: dict[int, _Call] = {}
        self._reports: dict[int, _Report] = {}
        self._gave_up: dict[int, _GaveUp] = {}
        # What the others have received: failures by exchange and by track.
        self._answer: _Answer | None = None
        self._failures: dict[int, _Failure] = {}
        self._lost: dict[int, _Failure] = {}
        # The call that this rank has reported, and whether that is under way.
        self._reported, self._unseen = (0, 0), False
        self._requests: list[Any] = []
        self._sent, self._received = [0] * self._size, [0] * self._size
        # The request and the result of the exchange of `_sent`, when it has begun.
        self._counts: tuple[Any, Any] | None = None

    # Tracks

    def open_track(self, what: str) -> Track:
        """Return a new track; in the same order on all ranks."""
        self._made += 1
        track = self._tracks[self._made] = Track(self._made, what)
        return track

    def close_track(self, track: Track) -> None:
        """Forget a track."""
        self._tracks.pop(track.number, None)

    def check(self, track: Track, deadline: Deadline) -> None:
        """Raise if the next call of a track, in which this rank waits, is impossible.

        Args:
            track: Of the call.
            deadline: Of the wait.

        Raises:
            DisagreementError: If another rank waits in a call that waits for this rank.
        """
        with self._lock:
            self._receive_all()
            if self._rank == 0:
                self._check_others(track)
            else:
                self._check_failure(track)
                self._report(track, deadline)

    def depart(self, track: Track) -> None:
        """Take back that this rank waits in the next call of a track."""
        with self._lock:
            if self._reported == (track.number, track.calls + 1):
                self._send(0, _Report(0, 0, "", {}))

    def _report(self, track: Track, deadline: Deadline) -> None:
        limit = deadline.elapsed + deadline.remaining
        early = deadline.elapsed < min(_PATIENCE, limit / 4)
        place = track.number, track.calls + 1
        if self._unseen or early or self._reported == place:
            return
        self._send(0, _Report(*place, str(track), self._passed()))
        self._reported, self._unseen = place, True

    def _passed(self) -> dict[int, int]:
        """Return how many calls are complete, of the tracks of this thread.

        Another thread of this rank may still come to its own.
        """
        mine = threading.get_ident()
        return {n: t.calls for n, t in self._tracks.items() if t.thread == mine}

    def _check_others(self, track: Track) -> None:
        """Look for ranks that wait for this one and have not made its call."""
        awaited = track.calls + 1
        places: dict[int, object] = {
            rank: call
            for rank, call in self._calls.items()
            if call.passed.get(track.number, awaited) < awaited
        }
        waiting = {
            rank: report
            for rank, report in self._impossible().items()
            if report.passed.get(track.number, awaited) < awaited
            and (report.track, report.number) != (track.number, awaited)
        }
        if places or waiting:
            tracks = {track.number, *(report.track for report in waiting.values())}
            self._fail(str(track), places | waiting, tracks)

    def _impossible(self) -> dict[int, _Report]:
        """Return the calls in which others wait for this thread, which is elsewhere."""
        mine = self._passed()
        return {
            rank: report
            for rank, report in self._reports.items()
            if mine.get(report.track, report.number) < report.number
        }

    def _check_failure(self, track: Track) -> None:
        if failure := self._lost.get(track.number):
            # This rank need not come to that exchange any more.
            self._number = max(self._number, failure.number)
            raise failure.kind(failure.text)

    def _fail(self, own: str, places: dict[int, object], tracks: set[int]) -> None:
        """Raise on every rank that waits: they make different calls."""
        by_call = {own: [0]}
        for rank, place in places.items():
            by_call.setdefault(str(place), []).append(rank)
        listed = ", ".join(f"{format_ranks(r)} in {c!r}" for c, r in by_call.items())
        error = DisagreementError(f"ranks make different calls: {listed}")
        # Those that have come to an exchange get no answer, either.
        self._number = max([self._number, *(c.number for c in self._calls.values())])
        self._spread(error, tracks)
        raise error

    # Exchanges

    def gather(self, value: T, what: str) -> list[T]:
        """Return the values of all ranks, in rank order. Collective.

        Raises:
            DisagreementError: On every rank that waits, if some wait in another call.
            WaitTimeoutError: After HPCACCUM_TIMEOUT seconds, on every rank that waits,
                and on those that come later; names who is missing.
        """
        if self._size == 1:
            return [value]
        deadline = Deadline(None, what)
        with self._lock:
            self._number += 1
            call = _Call(self._number, what, is_ending(), value, self._passed())
        return (self._ask if self._rank else self._collect)(call, deadline)

    def _collect(self, call: _Call, deadline: Deadline) -> list[Any]:
        try:
            deadline.wait(lambda: self._complete(call), lambda: self._absent(call))
        except DisagreementError:
            raise
        except BaseException as error:
            self._spread(error, set())
            raise
        with self._lock:
            values = [call.value, *(self._calls[r].value for r in range(1, self._size))]
            self._end()
            answer = _Answer(call.number, values)
            sent = [self._send(rank, answer) for rank in range(1, self._size)]
        deadline.wait(
            lambda: all(request.Test() for request in sent) or None,
            lambda: "the other ranks to receive the answer",
        )
        return values

    def _complete(self, call: _Call) -> bool | None:
        """Return True when all ranks have come; raise if one never will."""
        with self._lock:
            self._receive_all()
            for rank, other in self._gave_up.items():
                if other.number == call.number:
                    raise WaitTimeoutError(
                        f"{call.what}: rank {rank} gave up ({other.reason}) waiting "
                        f"for {self._absent(call)}"
                    )
            present = self._present(call)
            elsewhere: dict[int, object] = {
                rank: other
                for rank, other in present.items()
                if other.what != call.what
            }
            waiting = self._impossible()
            if elsewhere or waiting:
                tracks = {report.track for report in waiting.values()}
                self._fail(str(call), elsewhere | waiting, tracks)
            return len(present) == self._size - 1 or None

    def _present(self, call: _Call) -> dict[int, _Call]:
        return {r: c for r, c in self._calls.items() if c.number == call.number}

    def _absent(self, call: _Call) -> str:
        # With all others there, one of them gave up before this rank came.
        missing = set(range(1, self._size)) - set(self._present(call)) or {0}
        return f"{format_ranks(missing)} of {self._size} to make the same call"

    def _ask(self, call: _Call, deadline: Deadline) -> list[Any]:
        with self._lock:
            self._send(0, call)
        try:
            return deadline.wait(
                lambda: self._answered(call), lambda: "rank 0 to answer"
            )
        except BaseException as error:
            if self._failed(call):
                raise
            self._send(0, _GaveUp(call.number, type(error).__name__))
            if not isinstance(error, WaitTimeoutError):
                raise
            return self._last_look(call, error)

    def _last_look(self, call: _Call, error: WaitTimeoutError) -> list[Any]:
        """Return an answer that was late; else raise, what rank 0 knows if it waits."""
        try:
            grace = Deadline(_GRACE, call.what)
            return grace.wait(lambda: self._answered(call), lambda: "rank 0")
        except WaitTimeoutError as late:
            known = late if self._failed(call) else error
        raise known from None

    def _answered(self, call: _Call) -> list[Any] | None:
        """Return the answer of rank 0 if it is there; raise if that is an error."""
        with self._lock:
            self._receive_all()
            if self._answer is not None and self._answer.number == call.number:
                values, self._answer = self._answer.values, None
                return values
            if failure := self._failed(call):
                raise failure.kind(failure.text)
            return None

    def _failed(self, call: _Call) -> _Failure | None:
        return self._failures.get(call.number)

    def _spread(self, error: BaseException, tracks: set[int]) -> None:
        """Have the other ranks raise what rank 0 raises."""
        kind: type[Exception] = DisagreementError
        text = _reason(error)
        if not isinstance(error, DisagreementError):
            kind, text = WaitTimeoutError, f"rank 0 gave up: {text}"
        with self._lock:
            failure = _Failure(self._number, tuple(tracks), kind, text)
            self._end()
            self._reports.clear()
            for rank in range(1, self._size):
                self._send(rank, failure)

    def _end(self) -> None:
        """Forget the exchange that is over."""
        self._over = self._number
        self._calls = {r: c for r, c in self._calls.items() if c.number > self._over}

    # Messages

    def _send(self, rank: int, message: Any) -> Any:
        # Never blocking: a large message stays here until it is received.
        request = self._comm.isend(message, rank, _TAG)
        self._requests = [each for each in self._requests if not each.Test()]
        self._requests.append(request)
        self._sent[rank] += 1
        return request

    def _receive_all(self) -> None:
        status = MPI.Status()
        probe = functools.partial(self._comm.improbe, MPI.ANY_SOURCE, _TAG, status)
        while (message := probe()) is not None:
            source = status.Get_source()
            self._received[source] += 1
            self._note(source, message.recv())

    def _note(self, source: int, message: Any) -> None:
        """Remember a message, and forget what is over by it."""
        if isinstance(message, _Answer):
            self._answer = message
        elif isinstance(message, _Failure):
            self._failures[message.number] = message
            self._lost |= dict.fromkeys(message.tracks, message)
        elif isinstance(message, _Seen):
            self._unseen = False
        else:
            self._note_place(source, message)

    def _note_place(self, source: int, message: _Call | _Report | _GaveUp) -> None:
        self._reports.pop(source, None)
        if isinstance(message, _Report):
            self._reports[source] = message
            self._send(source, _Seen())
        elif isinstance(message, _GaveUp):
            self._gave_up[source] = message
        elif message.number > self._over:
            self._calls[source] = message

    def drain(self) -> None:
        """Receive all messages before the communicator is freed. Collective.

        MPI may give its context id to a later communicator, with messages that were not
        received.

        Raises:
            WaitTimeoutError: After HPCACCUM_TIMEOUT seconds.
        """
        if self._counts is None:
            # Kept after a timeout, as MPI still uses the arrays.
            sent, expected = np.array(self._sent), np.zeros(self._size, np.int64)
            self._counts = self._comm.Ialltoall(sent, expected), expected
        counted, expected = self._counts

        def drained() -> bool | None:
            if not counted.Test():
                return None
            self._receive_all()
            complete = self._received == expected.tolist()
            return (complete and MPI.Request.Testall(self._requests)) or None

        Deadline(None, "freeing a communicator").wait(
            drained, lambda: f"all {self._size} ranks to free it"
        )


def _reason(error: BaseException) -> str:
    return str(error) or type(error).__name__
