"""A timeline of all ranks, in Chrome's trace event format.

`trace` records the calls of methods that are marked in the code (`hpcaccum.spans`), and
compares the clocks of nodes. Rank 0 collects the events of all ranks, and writes them.
Those of a rank that is lost are lost with it.

The format: https://www.chromium.org/developers/how-tos/trace-event-profiling-tool
A node is a "process", and a thread of a rank is a "thread".

Source of the clocks: F. Cristian, Probabilistic Clock Synchronization, 1989.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import json
import logging
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hpcaccum.deadline import Deadline
from hpcaccum.errors import InvalidArgumentError, format_ranks
from hpcaccum.files import check_writable
from hpcaccum.mpi import MPI, Group, Tag, complete, group_of, receive
from hpcaccum.spans import Event, Recorder, clock, recorded_by, recording, span

if TYPE_CHECKING:
    from mpi4py import MPI as mpi4py_MPI

__all__ = ["span", "trace"]

logger = logging.getLogger("hpcaccum")

# Events in one message; and how often a node asks for the time.
_PIECE, _QUESTIONS = 1000, 32
_CALL = "trace: clocks of the nodes"
_encode = json.JSONEncoder(separators=(",", ":"), default=str).encode


@contextlib.contextmanager
def trace(
    path: str | os.PathLike[str], comm: mpi4py_MPI.Comm | Group | None = None
) -> Iterator[None]:
    """Record what every rank does during the block; rank 0 writes it to a file.

    The beginning and the end are collective. Objects may be created before or in the
    block. Open the file in https://ui.perfetto.dev or in ``chrome://tracing``: it has a
    row for each rank, and one for each thread that serves other ranks. Mark blocks of
    your program with `span`.

    If the block raises an exception, nothing is written: the other ranks may not have
    reached its end. The events of a rank that is lost are lost with it.

    Args:
        path: Of the JSON file, on rank 0; an existing file is overwritten.
        comm: Communicator of the ranks; COMM_WORLD by default.

    Raises:
        TypeError, InvalidArgumentError: On every rank, before the block, if the file
            cannot be written or a trace is running.
        OSError: After the block, on rank 0, if the file cannot be written; the other
            ranks continue.
    """
    group = group_of(comm)
    file = group.agree("trace", lambda: _checked(path, group.rank), lambda _: {})
    before, recorder = _measure(group), Recorder()
    origin = group.allgather(clock(), "trace: begin")[0]
    with recorded_by(recorder):
        yield
    after = _measure(group)
    Timeline(group, recorder, before, after, origin).write(file)


def _checked(path: str | os.PathLike[str], rank: int) -> Path:
    if recording() is not None:
        raise InvalidArgumentError("a trace is running already")
    file = Path(path)
    if rank == 0:
        # So begin the messages of `Group.agree`, which leaves it out then.
        check_writable("trace:", file)
    return file


# The file


class Timeline:
    """The events of this rank, as they are shown. Collective.

    The node's clock had the offsets ``before`` and ``after`` when the trace began and
    ended; ``origin`` is when it began, by the clock of rank 0.
    """

    def __init__(
        self,
        group: Group,
        recorder: Recorder,
        before: Offset,
        after: Offset,
        origin: float,
    ) -> None:
        self._group, self._clock, self._origin = group, (before, after), origin
        # Before the events are copied: no more come afterwards.
        left_out, self._most = recorder.left_out(), recorder.most
        self._rows = list(self._named_rows(recorder))
        error = max(before.error, after.error)
        facts = len(self._rows), left_out, error
        every = group.gather_present(facts, "trace: events")
        # Numbers of threads are unique in the file, and unlike those of processes.
        before_mine = sum(rows for r, (rows, *_) in every.items() if r < group.rank)
        self._first = 1 + len(group.nodes) + before_mine
        self._left_out = {rank: n for rank, (_, n, _) in every.items() if n}
        self._error = max(error for *_, error in every.values())
        self._others = every.keys() - {0}
        self._names_node = group.rank == min(every.keys() & {*group.node_ranks})

    def _named_rows(self, recorder: Recorder) -> Iterator[tuple[str, list[Event]]]:
        rank = f"rank {self._group.rank}"
        for thread, events in recorder.rows().items():
            name = f"{rank}: {thread}" if thread else rank
            for number, lane in enumerate(lanes(events), 1):
                yield (name if number == 1 else f"{name} ({number})"), lane

    def write(self, path: Path) -> None:
        """Collect the events of all ranks, and write the file. Collective."""
        if self._group.rank:
            self._send()
            return
        pieces = itertools.chain(self._pieces(), self._received())
        try:
            self._write(path, pieces)
        except OSError:
            # The other ranks wait until all of theirs are received.
            collections.deque(pieces, maxlen=0)
            raise
        if self._left_out:
            logger.warning(
                "trace %s: %d events of %s were left out; a rank keeps the first %d",
                path,
                sum(self._left_out.values()),
                format_ranks(self._left_out),
                self._most,
            )

    def _write(self, path: Path, pieces: Iterable[str]) -> None:
        other = {
            "clock_error_us": round(1e6 * self._error, 3),
            "events_left_out": {f"rank {r}": n for r, n in self._left_out.items()},
        }
        with path.open("w") as file:
            file.write(f'{{"otherData":{_encode(other)},"traceEvents":[\n')
            for number, piece in enumerate(pieces):
                file.write(",\n" * (number > 0) + piece)
            file.write("\n]}\n")

    # The pieces of this rank

    def _pieces(self) -> Iterator[str]:
        """Yield events as JSON, without the brackets of the list."""
        yield ",\n".join(map(_encode, self._names()))
        for number, (_, events) in enumerate(self._rows, self._first):
            for begin in range(0, len(events), _PIECE):
                piece = events[begin : begin + _PIECE]
                yield ",\n".join(_encode(self._shown(event, number)) for event in piece)

    def _names(self) -> Iterator[dict[str, Any]]:
        """Yield the names of this rank's rows, and of the node from its first rank."""
        group = self._group
        if self._names_node:
            name = f"node {MPI.Get_processor_name()}"
            yield self._metadata("process_name", 0, name=name)
            yield self._metadata("process_sort_index", 0, sort_index=group.node_number)
        for number, (name, _) in enumerate(self._rows, self._first):
            yield self._metadata("thread_name", number, name=name)
            yield self._metadata("thread_sort_index", number, sort_index=number)

    def _metadata(self, kind: str, thread: int, **args: Any) -> dict[str, Any]:
        return {"name": kind, "ph": "M", "pid": self._pid, "tid": thread, "args": args}

    @property
    def _pid(self) -> int:
        return 1 + self._group.node_number

    def _shown(self, event: Event, thread: int) -> dict[str, Any]:
        begin = self._microseconds(event.begin)
        shown = {
            "name": event.label.name,
            "cat": event.label.category,
            "ph": "X",
            "ts": begin,
            "dur": round(self._microseconds(event.end) - begin, 3),
            "pid": self._pid,
            "tid": thread,
        }
        return {**shown, "args": event.args} if event.args else shown

    def _microseconds(self, time: float) -> float:
        return round(1e6 * (common_time(time, *self._clock) - self._origin), 3)

    # Messages

    def _send(self) -> None:
        """Send the pieces to rank 0, one after the other, and None at the end."""
        for piece in itertools.chain(self._pieces(), [None]):
            request = self._group.comm.issend(piece, 0, Tag.TRACE)
            deadline = Deadline(None, "trace: events")
            complete([request], deadline, lambda: "rank 0 to receive events")

    def _received(self) -> Iterator[str]:
        """Yield the pieces of the other ranks in the order of their arrival."""
        missing = {*self._others}
        while missing:
            source, piece = Deadline(None, "trace: events").wait(
                lambda: receive(self._group.comm, Tag.TRACE),
                lambda: f"{format_ranks(missing)} to send events",
            )
            if piece is None:
                missing.discard(source)
            else:
                yield piece


def lanes(events: Iterable[Event]) -> list[list[Event]]:
    """Divide events so that in each list they are nested or one after the other.

    Those of the steps of an agent may overlap; viewers show a row as a stack of calls.
    """
    # Each lane has the ends of the events that may contain the next one.
    found: list[tuple[list[Event], list[float]]] = [([], [])]
    for event in sorted(events, key=lambda event: (event.begin, -event.end)):
        for lane, ends in found:
            while ends and ends[-1] <= event.begin:
                ends.pop()
            if not ends or event.end <= ends[-1]:
                lane.append(event)
                ends.append(event.end)
                break
        else:
            found.append(([event], [event.end]))
    return [lane for lane, _ in found]


# The clocks of nodes, compared with that of rank 0: the first rank of each node that is
# not lost asks rank 0 for the time, several times. The answer that came fastest counts:
# the offset lies within half of its round trip.


class Offset(NamedTuple):
    """What to add to a node's clock to get that of rank 0, and its largest error.

    In seconds; measured ``at`` a time by the node's clock.
    """

    at: float
    seconds: float
    error: float


def _measure(group: Group) -> Offset:
    """Return the offset of this rank's node. Collective."""
    present = group.gather_present(None, _CALL)
    nodes = [[rank for rank in ranks if rank in present] for ranks in group.nodes]
    first, *leaders = [ranks[0] for ranks in nodes if ranks]
    mine = Offset(clock(), 0.0, 0.0)
    if group.rank == first:
        for leader in leaders:
            _answer(group.comm, leader)
    elif group.rank in leaders:
        mine = _ask(group.comm, first)
    return group.gather_present(mine, _CALL)[nodes[group.node_number][0]]


def common_time(time: float, before: Offset, after: Offset) -> float:
    """Return a time of this node by the clock of rank 0.

    Between the two measurements, the offset is taken to grow evenly.
    """
    elapsed = max(after.at - before.at, 1e-9)
    drift = (after.seconds - before.seconds) / elapsed
    return time + before.seconds + drift * (time - before.at)


def _ask(comm: mpi4py_MPI.Intracomm, rank: int) -> Offset:
    found = []
    for _ in range(_QUESTIONS):
        answer, begun = np.empty(1), clock()
        question = comm.Isend(np.empty(0), rank, Tag.CLOCK)
        _wait([question, comm.Irecv(answer, rank, Tag.CLOCK)], rank)
        ended = clock()
        middle = (begun + ended) / 2
        found.append(Offset(middle, float(answer[0]) - middle, (ended - begun) / 2))
    return min(found, key=lambda offset: offset.error)


def _answer(comm: mpi4py_MPI.Intracomm, rank: int) -> None:
    for _ in range(_QUESTIONS):
        _wait([comm.Irecv(np.empty(0), rank, Tag.CLOCK)], rank)
        _wait([comm.Isend(np.array([clock()]), rank, Tag.CLOCK)], rank)


def _wait(requests: list[Any], rank: int) -> None:
    deadline = Deadline(None, _CALL)
    complete(requests, deadline, lambda: f"rank {rank} to make the same call")
