"""The file: events of all ranks as JSON, collected and written by rank 0.

Those of a rank that is lost are lost with it.

The format is Chrome's: https://www.chromium.org/developers/how-tos/trace-event-profiling-tool
A node is a "process", and a thread of a rank is a "thread".
"""

from __future__ import annotations

import collections
import itertools
import json
import logging
from typing import TYPE_CHECKING, Any

from hpcaccum.deadline import Deadline
from hpcaccum.errors import format_ranks
from hpcaccum.mpi import MPI, Tag, complete, receive
from hpcaccum.tracing.clocks import common_time

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from hpcaccum.mpi import Group
    from hpcaccum.spans import Event, Recorder
    from hpcaccum.tracing.clocks import Offset

logger = logging.getLogger("hpcaccum")

# Events in one message.
_PIECE = 1000

_encode = json.JSONEncoder(separators=(",", ":"), default=str).encode


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


class _Lane:
    """Events that are nested or one after the other."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        # Of the events that may contain the next one.
        self._ends: list[float] = []

    def take(self, event: Event) -> bool:
        """Take an event that begins after all before, unless it overlaps one."""
        while self._ends and self._ends[-1] <= event.begin:
            self._ends.pop()
        if self._ends and event.end > self._ends[-1]:
            return False
        self.events.append(event)
        self._ends.append(event.end)
        return True


def lanes(events: Iterable[Event]) -> list[list[Event]]:
    """Divide events so that in each list they are nested or one after the other.

    Those of the steps of an agent may overlap; viewers show a row as a stack of calls.
    """
    found = [_Lane()]
    for event in sorted(events, key=lambda event: (event.begin, -event.end)):
        if not any(lane.take(event) for lane in found):
            found.append(_Lane())
            found[-1].take(event)
    return [lane.events for lane in found]
