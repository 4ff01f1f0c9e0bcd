"""The heartbeat: finds ranks that have died or are cut off, and ends the job.

A rank that waits inside MPI for such a rank waits without end, and no limit of a
`Deadline` reaches it there. So a thread of each rank sends rank 0 a message now and
then, and rank 0 answers. A rank that has sent none for HPCACCUM_HEARTBEAT seconds is
missing. The ranks of a node also look whether each other's processes exist.

Messages say where a rank is, so that the error can name that place.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import threading
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from hpcaccum.deadline import FIRST_WARNING, Deadline, limit_of_environment
from hpcaccum.errors import format_ranks
from hpcaccum.lock import Lock
from hpcaccum.mpi.control_messages import Tag
from hpcaccum.mpi.mailbox import Mailbox
from hpcaccum.mpi.runtime import MPI
from hpcaccum.mpi.shutdown import abort_because, report_and_abort
from hpcaccum.wake import Wake

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpcaccum.mpi.group import Group

logger = logging.getLogger("hpcaccum")

# Seconds between two looks, and between two messages of a rank; each is at most the
# limit divided by the second number.
_LOOK, _LOOKS = 1.0, 10
_MESSAGE, _MESSAGES = 5.0, 60
# Seconds between two looks whether the thread has ended.
_SOON = 0.01
# Seconds after the end of a process for which its launcher may end the job.
_GRACE = 3.0
# In messages: missing ranks that are listed, and characters of a place.
_SHOWN, _LENGTH = 8, 160
VARIABLE = "HPCACCUM_HEARTBEAT"
# Seconds without a message after which a rank is missing, if the variable is not set.
# A computation that holds Python's interpreter lock delays messages for as long.
_LIMIT = 300.0


class Facts(NamedTuple):
    """Of a rank: its limit, its process, and whether its threads may call MPI."""

    limit: float
    process: Process
    threads: bool

    @classmethod
    def own(cls) -> Facts:
        """Return those of this rank.

        Raises:
            InvalidArgumentError: If HPCACCUM_HEARTBEAT is invalid.
        """
        limit = limit_of_environment(VARIABLE, _LIMIT)
        return cls(limit, Process.own(), MPI.Query_thread() >= MPI.THREAD_MULTIPLE)


class _Beat(NamedTuple):
    """What a rank sends: its place, and the ranks of its node that have died."""

    place: str
    leaves: bool
    dead: frozenset[int]


@dataclass
class _Peer:
    """A rank that sends messages to this one.

    Attributes:
        seen: When the last one came.
        place: Where the rank was then.
        leaves: Whether it was the last one.
        warned: Whether a warning has been given since.
    """

    seen: float = field(default_factory=time.monotonic)
    place: str = "the start"
    leaves: bool = False
    warned: bool = False


class Heartbeat:
    """The heartbeat of a group. Collective.

    An earlier one of the group has been stopped on all ranks.

    Args:
        group: The ranks.
        facts: Those of each rank.
        place: Returns where this rank is; any thread may call it.
    """

    def __init__(
        self, group: Group, facts: Sequence[Facts], place: Callable[[], str]
    ) -> None:
        self._group, self._place = group, place
        self._limit = facts[group.rank].limit
        self._processes = [each.process for each in facts]
        # Without them no rank sends anything; processes that end are found.
        self._talks = all(each.threads for each in facts)
        others = range(1, group.size) if group.rank == 0 else range(1)
        self._peers = {rank: _Peer() for rank in others if self._talks}
        mates = set(group.node_ranks) - {group.rank}
        # In containers, processes may not see each other.
        self._mates = {rank for rank in mates if self._processes[rank].exists()}
        self._dead: dict[int, float] = {}
        self._mailbox = Mailbox(group.comm, Tag.HEARTBEAT)
        self._sent = -math.inf
        # Whether the other ranks have been told that no more messages come.
        self._left = False
        _thread.add(self)

    @property
    def interval(self) -> float:
        """Seconds between two calls of `look`."""
        return min(_LOOK, self._limit / _LOOKS)

    def stop(self) -> None:
        """Stop it. Collective. After an exception it can be called again.

        Raises:
            WaitTimeoutError: After HPCACCUM_TIMEOUT seconds.
        """
        _thread.remove(self)
        if not self._left:
            self._send(leaves=True)
            # `drain` counts what has been sent: nothing may be sent afterwards.
            self._left = True
        self._mailbox.drain()

    def look(self) -> None:
        """Receive and send messages; end the job if a rank is missing."""
        now = time.monotonic()
        if self._talks:
            self._receive(now)
        self._find_dead(now)
        if now - self._sent >= min(_MESSAGE, self._limit / _MESSAGES):
            self._sent = now
            self._send()
        self._check(now)

    def forgive(self, seconds: float) -> None:
        """Do not count a time in which this process did not run."""
        for peer in self._peers.values():
            peer.seen += seconds

    def _receive(self, now: float) -> None:
        for rank, beat in self._mailbox.receive():
            peer = self._peers[rank]
            if peer.warned:
                logger.warning("the heartbeat of %s has resumed", self._name(rank))
            peer.seen, peer.place, peer.leaves = now, beat.place, beat.leaves
            peer.warned = False
            for each in beat.dead:
                self._dead.setdefault(each, now)

    def _send(self, *, leaves: bool = False) -> None:
        beat = _Beat(self._place()[:_LENGTH], leaves, frozenset(self._dead))
        listening = [r for r, peer in self._peers.items() if leaves or not peer.leaves]
        self._mailbox.send([r for r in listening if r not in self._dead], beat)

    def _find_dead(self, now: float) -> None:
        """Look for processes of this node that have ended."""
        found = {
            rank
            for rank in self._mates - self._dead.keys()
            if not self._leaves(rank) and not self._processes[rank].exists()
        }
        self._dead |= dict.fromkeys(found, now)

    def _leaves(self, rank: int) -> bool:
        return rank in self._peers and self._peers[rank].leaves

    def _check(self, now: float) -> None:
        """End the job if ranks have died or are missing; warn if they are late."""
        dead = [rank for rank, since in self._dead.items() if now - since > _GRACE]
        if dead and self._decides():
            ranks = format_ranks(dead)
            self._end(f"the program of {ranks} has ended, without MPI_Finalize", dead)
        silent = {r: now - p.seen for r, p in self._peers.items() if not p.leaves}
        late = {r: age for r, age in silent.items() if age > self._patience}
        if max(late.values(), default=0.0) > self._limit:
            text = f"no heartbeat for {self._limit:g} s from {format_ranks(late)}"
            self._end(f"{text}; {VARIABLE} sets the limit", late)
        self._warn([rank for rank in late if not self._peers[rank].warned])

    @property
    def _patience(self) -> float:
        """Seconds without a message that a warning reports."""
        return min(FIRST_WARNING, self._limit / 2)

    def _decides(self) -> bool:
        """Whether this rank reports ranks that have died: the first one that can."""
        if self._talks and 0 not in self._dead:
            return self._group.rank == 0
        return self._group.rank == min({self._group.rank, *self._mates} - {*self._dead})

    def _warn(self, ranks: Collection[int]) -> None:
        for rank in ranks:
            self._peers[rank].warned = True
        if ranks:
            text = "no heartbeat for %.3g s from %s:\n%s"
            names = format_ranks(ranks)
            logger.warning(text, self._patience, names, self._list(ranks))

    def _end(self, text: str, ranks: Collection[int]) -> None:
        abort_because(f"{text}\n{self._list(ranks)}")

    def _list(self, ranks: Iterable[int]) -> str:
        found = sorted(ranks)
        lines = [self._describe(rank) for rank in found[:_SHOWN]]
        if more := found[_SHOWN:]:
            lines.append(f"and {len(more)} more")
        return "\n".join(f"  {line}" for line in lines)

    def _describe(self, rank: int) -> str:
        if rank not in self._peers:
            return self._name(rank)
        peer = self._peers[rank]
        age = time.monotonic() - peer.seen
        return f"{self._name(rank)}: last seen {age:.3g} s ago: {peer.place}"

    def _name(self, rank: int) -> str:
        process = self._processes[rank]
        return f"rank {rank} (process {process.number} on {process.host})"


class _Thread:
    """Calls `Heartbeat.look` of all groups of this process.

    An exception may interrupt a method: the thread ends by itself if there is nothing
    to look at, and the next heartbeat starts one if none will go on.
    """

    def __init__(self) -> None:
        self._hearts: list[Heartbeat] = []
        # Held during a look, so that none is stopped meanwhile.
        self._lock = Lock()
        self._changed = Wake()
        # Set to None by the thread itself, when it ends.
        self._thread: threading.Thread | None = None

    def add(self, heart: Heartbeat) -> None:
        """Begin with a heartbeat; the first one starts the thread."""
        with self._lock:
            self._hearts.append(heart)
            if self._thread is None:
                thread = threading.Thread(
                    target=self._run_or_abort, daemon=True, name="heartbeat"
                )
                thread.start()
                # Last, as two threads do no harm, but none at all does.
                self._thread = thread
        self._changed.wake()

    def remove(self, heart: Heartbeat) -> None:
        """End a heartbeat; the last one ends the thread. It can be called again."""
        with self._lock:
            if heart in self._hearts:
                self._hearts.remove(heart)
            ending = None if self._hearts else self._thread
        self._changed.wake()
        if ending is not None:

            def ended(seconds: float) -> bool | None:
                ending.join(min(seconds, _SOON))
                # Another thread of this rank may have begun with one meanwhile.
                return None if ending.is_alive() and not self._hearts else True

            # A thread of this rank: no limit of the user's applies.
            deadline = Deadline(math.inf, ending.name)
            deadline.block(ended, lambda: "its thread to end")

    def _run_or_abort(self) -> None:
        try:
            while (pause := self._look()) is not None:
                self._wait(pause)
        except BaseException:
            # Without this thread, the other ranks would find this one missing.
            report_and_abort(*sys.exc_info())

    def _wait(self, pause: float) -> None:
        begun = time.monotonic()
        self._changed.nap(pause)
        # Not the time of `look`: MPI may take long if another thread waits in it.
        late = time.monotonic() - begun - pause
        if late > _LOOK:
            with self._lock:
                for heart in self._hearts:
                    heart.forgive(late)

    def _look(self) -> float | None:
        """Look once; return the seconds until the next time, None at the end."""
        with self._lock:
            for heart in self._hearts:
                heart.look()
            if not self._hearts:
                # While the lock is held: `add` counts on a thread that goes on.
                self._thread = None
            return min((heart.interval for heart in self._hearts), default=None)


_thread = _Thread()


class Process(NamedTuple):
    """A rank's process: its host, its number there and when it was started."""

    host: str
    number: int
    started: str

    @classmethod
    def own(cls) -> Process:
        """Return that of this rank."""
        number = os.getpid()
        return cls(MPI.Get_processor_name(), number, _start_time(number))

    def exists(self) -> bool:
        """Whether it runs on this rank's node."""
        return _start_time(self.number) == self.started


def _start_time(process: int) -> str:
    """Return when a process of this node was started, "" if there is none now."""
    try:
        stat = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return ""
    # After the name, which may contain spaces. Source: proc(5), fields 3 and 22.
    state, *fields = stat.rpartition(")")[2].split()
    return "" if state in "ZX" else fields[18]
