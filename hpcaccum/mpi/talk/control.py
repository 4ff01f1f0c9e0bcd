"""Collective exchanges of small objects, and checks that all ranks make the same call.

All ranks of a group must make the same collective calls in the same order. Otherwise
they would wait for each other in different calls, without end. So every exchange has a
name and a number. Rank 0 collects the values, compares the names, and sends the answer.

Reductions are collective calls without rank 0 (a `Track` counts those of a reducer). A
rank that waits long in one reports it to rank 0. If an exchange and a reduction wait
for each other, rank 0 raises an error, and sends it to every rank that waits. After a
longer wait the rank reports its call to all, so that each can name those that are
missing. Ranks are not asked: a rank that computes would not answer.

Messages of one rank arrive in order. So rank 0 knows the place of a rank from the last
message alone.

A rank that has entered an exchange, or may have, says so if it gives up.

Once a rank is lost, the exchanges of all ranks raise an error. The others can make
exchanges among themselves, which have numbers of their own.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from hpcaccum.deadline import Deadline
from hpcaccum.errors import (
    DisagreementError,
    LostRankError,
    WaitTimeoutError,
    echo,
    format_ranks,
)
from hpcaccum.mpi.job.shutdown import is_ending
from hpcaccum.mpi.talk.mailbox import Mailbox, Tag
from hpcaccum.mpi.talk.requests import is_complete

if TYPE_CHECKING:
    from mpi4py import MPI as mpi4py_MPI

T = TypeVar("T")

# Seconds after which a rank that waits in a call of a track reports it to rank 0. A
# rank has at most one report in flight, so reports cost little if a rank is just slow.
_PATIENCE = 0.2
# Seconds after which it reports the call to all ranks: well before the first warning,
# and so rare that one message to each does not matter.
_LONG_PATIENCE = 5.0
# Seconds that a rank whose limit has passed waits for rank 0 to name the missing ranks.
_GRACE = 0.2
# The number before that of the first exchange after a loss.
_AFTER_LOSS = 1 << 40


@dataclass
class Track:
    """A series of collective calls, which every rank counts."""

    # The same on all ranks of the group.
    number: int
    what: str
    # Ends messages about ranks that do not make the next call.
    advice: str = ""
    # Those that are complete on this rank.
    calls: int = 0
    # That made the last one.
    thread: int = field(default_factory=threading.get_ident)

    def __str__(self) -> str:
        """Name the next call."""
        return f"{self.what} {self.calls + 1}"


# Messages, of classes that every rank knows


class Call(NamedTuple):
    """A rank has entered exchange ``number``, after its complete calls by track.

    Its value is pickled in a message.
    """

    number: int
    what: str
    ending: bool
    value: Any
    complete: dict[int, int]

    def __str__(self) -> str:
        return self.what + (" (at the end of its program)" if self.ending else "")


class Report(NamedTuple):
    """A rank waits in call ``number`` of a track; in none if that is track 0."""

    track: int
    number: int
    what: str = ""

    def __str__(self) -> str:
        return self.what


class GaveUp(NamedTuple):
    """A rank has stopped waiting for the answer to an exchange.

    If it has found that a rank is lost, ``lost`` says which, and why.
    """

    number: int
    reason: str
    lost: str = ""


class Answer(NamedTuple):
    """The values of all ranks in an exchange, pickled."""

    number: int
    values: bytes


class Failure(NamedTuple):
    """Exchange ``number`` has failed on all ranks, as have calls of these tracks."""

    number: int
    tracks: tuple[int, ...]
    kind: type[Exception]
    text: str


class ControlChannel:
    """The exchanges of one group, and its tracks. Used by its `Group`.

    ``lost`` are its ranks that are lost, each with why. It is changed while `lock` is
    held, as while messages are sent and received.
    """

    def __init__(self, comm: mpi4py_MPI.Intracomm, lost: Mapping[int, str]) -> None:
        self._lost_ranks = lost
        self.mailbox = Mailbox(comm, Tag.CONTROL)
        self._rank, self._size = comm.rank, comm.size
        self._others = range(1, comm.size)
        # The last exchange that this rank has entered, and the last that has ended.
        self._number = self._ended = 0
        self._tracks: dict[int, Track] = {}
        self._made = 0
        # Several threads of a rank may wait in different calls.
        self.lock = threading.RLock()
        # On rank 0: the last messages of each rank.
        self._calls: dict[int, Call] = {}
        self._reports: dict[int, Report] = {}
        self._gave_up: dict[int, GaveUp] = {}
        # On the other ranks: the last answer, and failures by exchange and by track.
        self._answer: Answer | None = None
        self._failures: dict[int, Failure] = {}
        self._lost: dict[int, Failure] = {}
        # The call that this rank has reported, and the request for that message.
        self._reported: tuple[int, int] = 0, 0
        self._report_sent: Any = None
        # By track, the last call that each rank has reported.
        self._arrivals: dict[int, dict[int, int]] = {}

    # Tracks

    def open_track(self, what: str) -> Track:
        """Return a new track. All ranks must open their tracks in the same order."""
        self._made += 1
        track = self._tracks[self._made] = Track(self._made, what)
        return track

    def close_track(self, track: Track) -> None:
        """Forget a track."""
        self._tracks.pop(track.number, None)
        self._lost.pop(track.number, None)
        self._arrivals.pop(track.number, None)

    def check(self, track: Track, deadline: Deadline) -> None:
        """Raise if the next call of a track, in which this rank waits, cannot complete.

        Because a rank that has not made the call waits for this one in an exchange.
        """
        with self.lock:
            self._receive_all()
            if self._rank == 0:
                self._check_others(track)
            elif failure := self._lost.get(track.number):
                # This rank need not enter that exchange any more.
                self._number = max(self._number, failure.number)
                raise echo(failure.kind(failure.text))
            self._report(track, deadline)

    def absent(self, track: Track) -> list[int]:
        """Return the ranks that have not reported the next call of a track."""
        with self.lock:
            self._receive_all()
            there = self._arrivals.get(track.number, {})
            ranks = range(self._size)
            return [rank for rank in ranks if there.get(rank, 0) <= track.calls]

    def depart(self, track: Track) -> None:
        """Withdraw the report that this rank waits in the next call of a track."""
        with self.lock:
            if self._reported == (track.number, track.calls + 1):
                self.mailbox.send([0], Report(0, 0))
                # The same call may be made, and reported, again.
                self._reported = 0, 0

    def _report(self, track: Track, deadline: Deadline) -> None:
        """Report a call that takes long to rank 0, and later to all others."""
        place = track.number, track.calls + 1
        there = self._arrivals.setdefault(track.number, {})
        if there.get(self._rank, 0) <= track.calls and _late(deadline, _LONG_PATIENCE):
            there[self._rank] = track.calls + 1
            others = [rank for rank in self._others if rank != self._rank]
            self.mailbox.send(others, Report(*place, str(track)))
        if self._rank == 0 or self._reported == place or not _late(deadline, _PATIENCE):
            return
        if is_complete(self._report_sent):
            # Before it is sent, as `depart` may withdraw one that was not, but must
            # withdraw one that was.
            self._reported = place
            report = Report(*place, str(track))
            # Complete when rank 0 has received it.
            [self._report_sent] = self.mailbox.send([0], report, synchronous=True)

    def _complete_calls(self) -> dict[int, int]:
        """Return the complete calls of this thread's tracks; others may make more."""
        mine = threading.get_ident()
        return {n: t.calls for n, t in self._tracks.items() if t.thread == mine}

    def _check_others(self, track: Track) -> None:
        """On rank 0, raise if ranks in an exchange have not made its own call."""
        awaited = track.calls + 1
        others = {
            rank: call
            for rank, call in self._calls.items()
            if call.complete.get(track.number, awaited) < awaited
        }
        self._fail_if_any(str(track), {track.number}, others)

    def _fail_if_any(
        self, own: str, tracks: set[int], others: Mapping[int, Call | Report]
    ) -> None:
        """Raise on every rank that waits if others are not in rank 0's own call."""
        if not others:
            return
        by_call = {own: [0]}
        for rank, place in others.items():
            by_call.setdefault(str(place), []).append(rank)
        listed = ", ".join(f"{format_ranks(r)} in {c!r}" for c, r in by_call.items())
        advice = {self._tracks[each].advice for each in tracks & self._tracks.keys()}
        text = "; ".join([f"ranks make different calls: {listed}", *advice - {""}])
        error = DisagreementError(text)
        # The exchanges that other ranks have entered fail, too.
        self._number = max([self._number, *(c.number for c in self._calls.values())])
        self._spread(error, tracks)
        self._reports.clear()
        raise error

    # Exchanges

    def gather(self, value: T, what: str) -> list[T]:
        """Return the values of all ranks, in rank order. Collective.

        The errors are those of `Group.allgather`. If rank 0 cannot unpickle a value, it
        raises a TypeError, and the others a WaitTimeoutError that says so.
        """
        if self._size == 1:
            return [value]
        self.check_all_present(what)
        return list(self._exchange(value, what, self._number + 1).values())

    def gather_rest(self, value: T, what: str) -> dict[int, T]:
        """Do as `gather` among the ranks that are not lost; return values by rank."""
        return self._exchange(value, what, max(self._number, _AFTER_LOSS) + 1)

    def _exchange(self, value: T, what: str, number: int) -> dict[int, T]:
        deadline = Deadline(None, what)
        with self.lock:
            places = self._complete_calls()
            call = Call(number, what, is_ending(), value, places)
        return (self._ask if self._rank else self._collect)(call, deadline)

    def check_all_present(self, what: str) -> None:
        """Raise LostRankError if a rank is lost."""
        if self._lost_ranks:
            reasons = "; ".join(self._lost_ranks.values())
            raise LostRankError(f"{what}, which needs all ranks: {reasons}")

    def _check_lost(self, call: Call) -> None:
        if call.number <= _AFTER_LOSS:
            self.check_all_present(call.what)

    def _collect(self, call: Call, deadline: Deadline) -> dict[int, Any]:
        try:
            # From now on this rank must answer, or say that it gave up.
            self._number = call.number
            values, sent = deadline.wait(
                lambda: self._answer_if_complete(call), lambda: self._absent(call)
            )
        except DisagreementError:
            raise
        except BaseException as error:
            self._spread(error, set())
            raise
        deadline.wait(
            lambda: (
                all(r in self._lost_ranks or is_complete(q) for r, q in sent) or None
            ),
            lambda: "the other ranks to receive the answer",
        )
        return values

    def _answer_if_complete(self, call: Call) -> tuple[dict[int, Any], Any] | None:
        """Send the answer if all ranks have made the call; return it, and requests."""
        with self.lock:
            self._receive_all()
            self._check_lost(call)
            self._check_gave_up(call)
            self._check_same(call)
            if self._missing(call):
                return None
            values = {0: call.value}
            ranks = sorted(self._present(call))
            values |= {rank: self._value_of(rank, call) for rank in ranks}
            answer = Answer(call.number, pickle.dumps(values))
            # MPI may never complete what is sent to a rank that is lost.
            sent = list(zip(ranks, self.mailbox.send(ranks, answer), strict=True))
            self._end()
        return values, sent

    def _value_of(self, rank: int, call: Call) -> Any:
        try:
            return pickle.loads(self._calls[rank].value)
        except Exception as error:
            raise TypeError(
                f"{call.what}: rank 0 cannot unpickle the value of rank {rank}: {error}"
            ) from error

    def _check_gave_up(self, call: Call) -> None:
        for rank, other in self._gave_up.items():
            if other.number == call.number and other.lost:
                raise LostRankError(other.lost)
            if other.number == call.number:
                raise WaitTimeoutError(
                    f"{call.what}: rank {rank} gave up ({other.reason}) waiting "
                    f"for {self._absent(call)}"
                )

    def _check_same(self, call: Call) -> None:
        """Raise if ranks make another call, or wait in one for this rank."""
        present, mine = self._present(call).items(), self._complete_calls()
        reports = {
            rank: report
            for rank, report in self._reports.items()
            if mine.get(report.track, report.number) < report.number
        }
        others = {rank: other for rank, other in present if other.what != call.what}
        tracks = {report.track for report in reports.values()}
        self._fail_if_any(str(call), tracks, {**others, **reports})

    def _present(self, call: Call) -> dict[int, Call]:
        return {r: c for r, c in self._calls.items() if c.number == call.number}

    def _missing(self, call: Call) -> set[int]:
        return {*self._others} - self._present(call).keys() - self._lost_ranks.keys()

    def _absent(self, call: Call) -> str:
        # If no other is missing, one of them gave up before this rank made the call.
        missing = self._missing(call) or {0}
        return f"{format_ranks(missing)} of {self._size} to make the same call"

    def _ask(self, call: Call, deadline: Deadline) -> dict[int, Any]:
        try:
            # From now on this rank must make the call, or say that it gave up.
            self._number = call.number
            # A message that cannot be unpickled would never leave the mailbox.
            message = call._replace(value=pickle.dumps(call.value))
            with self.lock:
                self.mailbox.send([0], message)
            return deadline.wait(
                lambda: self._answered(call), lambda: "rank 0 to answer"
            )
        except BaseException as error:
            if self._failed(call):
                raise
            with self.lock:
                lost = str(error) if isinstance(error, LostRankError) else ""
                gave_up = GaveUp(call.number, type(error).__name__, lost)
                self.mailbox.send([0], gave_up)
            if not isinstance(error, WaitTimeoutError):
                raise
            return self._last_look(call, error)

    def _last_look(self, call: Call, error: WaitTimeoutError) -> dict[int, Any]:
        """Return the answer, or raise rank 0's error, if either arrives soon."""
        try:
            grace = Deadline(_GRACE, call.what)
            return grace.wait(lambda: self._answered(call), lambda: "rank 0")
        except WaitTimeoutError as late:
            known = late if self._failed(call) else error
        raise known from None

    def _answered(self, call: Call) -> dict[int, Any] | None:
        """Return the answer of rank 0 if it has arrived; raise it if it is an error."""
        with self.lock:
            self._receive_all()
            if self._answer is not None and self._answer.number == call.number:
                values, self._answer = self._answer.values, None
                return pickle.loads(values)  # type: ignore[no-any-return]
            if failure := self._failed(call):
                raise echo(failure.kind(failure.text))
            # After a look for the answer, which rank 0 sends before it tells of a loss.
            self._check_lost(call)
            return None

    def _failed(self, call: Call) -> Failure | None:
        return self._failures.get(call.number)

    def _spread(self, error: BaseException, tracks: set[int]) -> None:
        """Send the error that rank 0 raises to all other ranks."""
        kind: type[Exception] = WaitTimeoutError
        text = f"rank 0 gave up: {str(error) or type(error).__name__}"
        if isinstance(error, (DisagreementError, LostRankError)):
            kind, text = type(error), str(error)
        with self.lock:
            failure = Failure(self._number, tuple(tracks), kind, text)
            self.mailbox.send(self._others, failure)
            self._end()

    def _end(self) -> None:
        """Forget the exchange that has ended."""
        self._ended = self._number
        self._calls = {r: c for r, c in self._calls.items() if c.number > self._ended}

    # Messages

    def _receive_all(self) -> None:
        """Store the messages that have arrived, and discard what they supersede."""
        for source, message in self.mailbox.receive():
            if isinstance(message, Answer):
                self._answer = message
                continue
            if isinstance(message, Failure):
                self._failures[message.number] = message
                self._lost |= dict.fromkeys(message.tracks, message)
                continue
            self._reports.pop(source, None)
            if isinstance(message, Report):
                self._reports[source] = message
                self._arrivals.setdefault(message.track, {})[source] = message.number
            elif isinstance(message, GaveUp):
                self._gave_up[source] = message
            elif message.number > self._ended:
                self._calls[source] = message


def _late(deadline: Deadline, patience: float) -> bool:
    """Whether a call has waited for so long, or for a part of its limit."""
    limit = deadline.elapsed + deadline.remaining
    return deadline.elapsed >= min(patience, limit / 4)
