"""The heartbeat: finds ranks that have died or are cut off.

A thread of each rank sends rank 0 a message now and then, and rank 0 answers. A rank
that has sent none for HPCACCUM_HEARTBEAT seconds is lost. So is one whose process has
ended: the ranks of a host look whether each other's processes exist. Rank 0 decides
which ranks are lost, and tells the others; if it is rank 0 that has died, the first
rank that sees it.

Messages say where a rank is, so that the error can name that place.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import NamedTuple

from hpcaccum.deadline import FIRST_WARNING
from hpcaccum.mpi.job.process import HEARTBEAT
from hpcaccum.mpi.job.shutdown import abort_because, or_abort
from hpcaccum.mpi.talk.group import Group
from hpcaccum.mpi.talk.mailbox import Mailbox, Tag

logger = logging.getLogger("hpcaccum")

# Seconds between two looks, and between two messages of a rank; each is at most the
# limit divided by the second number.
_LOOK, _LOOKS = 0.25, 10
_MESSAGE, _MESSAGES = 5.0, 60
# Seconds that a nap takes longer if the process did not run meanwhile.
_LATE = 1.0
# Seconds after the end of a process in which its launcher may end the job: if that is
# what happens to the job in any case, and if it is not.
_GRACE, _SHORT_GRACE = 3.0, 0.25
# Characters of a place in messages.
_LENGTH = 160


class _Beat(NamedTuple):
    """What a rank sends."""

    # Where it is, and whether this is its last message.
    place: str
    leaves: bool
    # The ranks whose processes have ended; those that are lost, by its decision.
    dead: frozenset[int]
    lost: dict[int, str]


@dataclass
class _Peer:
    """A rank that sends messages to this one: when the last one came, and its facts."""

    seen: float = field(default_factory=time.monotonic)
    place: str = "the start"
    leaves: bool = False
    # Whether a warning has been given since.
    warned: bool = False


class Heartbeat:
    """The heartbeat of a group; an earlier one has been stopped. Collective.

    ``place`` returns where this rank is; any thread may call it. ``lose`` is called
    with ranks that are lost, and with why, and adds them to those of the group; later
    again without any.
    """

    def __init__(
        self,
        group: Group,
        place: Callable[[], str],
        lose: Callable[[dict[int, str]], None],
    ) -> None:
        self._group, self._place, self._lose = group, place, lose
        facts = group.facts
        self._limit = facts[group.rank].limit
        # Seconds without a message that a warning reports.
        self._patience = min(FIRST_WARNING, self._limit / 2)
        self._processes = [each.process for each in facts]
        # Without them no rank sends anything; processes that end are found.
        self._talks = all(each.threads for each in facts)
        self._goes_on = self._talks and all(each.goes_on for each in facts)
        others = range(1, group.size) if group.rank == 0 else range(1)
        self._peers = {rank: _Peer() for rank in others if self._talks}
        self._mates = group.mates
        # When it was seen that a process had ended.
        self._dead: dict[int, float] = {}
        self._mailbox = Mailbox(group.comm, Tag.HEARTBEAT)
        self._sent = -math.inf
        # Whether the other ranks have been told that no more messages come.
        self._left = False
        # Held during a look.
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._thread = threading.Thread(
            target=or_abort(self._run), daemon=True, name="heartbeat"
        )
        self._thread.start()

    def _run(self) -> None:
        pause = min(_LOOK, self._limit / _LOOKS)
        begun = time.monotonic()
        while not self._ended.wait(pause):
            # Not the time of `look`: MPI may take long if another thread waits in it.
            late = time.monotonic() - begun - pause
            with self._lock:
                if late > _LATE:
                    self.forgive(late)
                self.look()
            begun = time.monotonic()

    def stop(self) -> None:
        """Stop it. Collective. After a timeout it can be called again."""
        self._ended.set()
        self._thread.join()
        if not self._left:
            self._send(leaves=True)
            # `drain` counts what has been sent: nothing may be sent afterwards.
            self._left = True
        if not self._group.lost:
            self._mailbox.drain()

    def look(self) -> None:
        """Receive and send messages; find ranks that are lost."""
        now = time.monotonic()
        if self._talks:
            self._receive(now)
        found = self._find_dead(now)
        if found or now - self._sent >= min(_MESSAGE, self._limit / _MESSAGES):
            self._sent = now
            self._send()
        self._check(now)
        if self._group.lost:
            # By now this rank may wait in MPI for them.
            self._lose({})

    def forgive(self, seconds: float) -> None:
        """Do not count a time in which this process did not run."""
        for peer in self._peers.values():
            peer.seen += seconds

    def _receive(self, now: float) -> None:
        for rank, beat in self._mailbox.receive():
            if (peer := self._peers.get(rank)) is not None:
                if peer.warned:
                    logger.warning("the heartbeat of %s has resumed", self._name(rank))
                peer.seen, peer.place, peer.leaves = now, beat.place, beat.leaves
                peer.warned = False
            for each in beat.dead:
                self._dead.setdefault(each, now)
            self._note_lost(beat.lost)

    def _send(self, *, leaves: bool = False) -> None:
        lost = self._group.lost if self._decides() else {}
        beat = _Beat(self._place()[:_LENGTH], leaves, frozenset(self._dead), lost)
        listening = [r for r, peer in self._peers.items() if leaves or not peer.leaves]
        if self._group.lost and self._decides():
            listening = list(range(self._group.size))
        gone = {*self._dead, self._group.rank}
        self._mailbox.send([rank for rank in listening if rank not in gone], beat)

    def _find_dead(self, now: float) -> bool:
        """Look for processes of this host that have ended; return whether any has."""
        found = {
            rank
            for rank in {*self._mates} - self._dead.keys()
            if not self._leaves(rank) and not self._processes[rank].exists()
        }
        self._dead |= dict.fromkeys(found, now)
        return bool(found)

    def _leaves(self, rank: int) -> bool:
        return rank in self._peers and self._peers[rank].leaves

    def _check(self, now: float) -> None:
        """Decide which ranks are lost; warn if some are late."""
        grace = _SHORT_GRACE if self._goes_on else _GRACE
        dead = [r for r, t in self._dead.items() if now - t > grace if self._is_here(r)]
        if dead and self._decides():
            self._declare(dead, "its process has ended without MPI_Finalize")
        ages = {r: now - p.seen for r, p in self._peers.items() if not p.leaves}
        late = {r: a for r, a in ages.items() if a > self._patience if self._is_here(r)}
        if silent := [rank for rank, age in late.items() if age > self._limit]:
            why = f"no heartbeat for {self._limit:g} s ({HEARTBEAT} sets the limit)"
            self._declare(silent, why)
        self._warn([rank for rank in late if not self._peers[rank].warned])

    def _is_here(self, rank: int) -> bool:
        return rank not in self._group.lost and not self._leaves(rank)

    def _decides(self) -> bool:
        """Whether this rank decides which ranks are lost: the first one that can."""
        if self._talks and 0 not in self._dead and self._is_here(0):
            return self._group.rank == 0
        return self._group.rank == min({self._group.rank, *self._mates} - {*self._dead})

    def _declare(self, ranks: Collection[int], why: str) -> None:
        """Decide that ranks are lost, or end the job because of them."""
        found = {rank: f"{self._describe(rank)} is lost: {why}" for rank in ranks}
        for rank in _lost_with(self._group, ranks):
            if rank not in ranks and self._is_here(rank):
                found[rank] = f"{self._name(rank)} is lost with its node"
        if not self._goes_on:
            abort_because("\n".join(found.values()))
        self._note_lost(found)
        self._send()

    def _note_lost(self, found: dict[int, str]) -> None:
        known = self._group.lost
        if new := {rank: text for rank, text in found.items() if rank not in known}:
            self._lose(new)

    def _warn(self, ranks: Collection[int]) -> None:
        for rank in ranks:
            self._peers[rank].warned = True
            logger.warning(
                "no heartbeat for %.3g s from %s", self._patience, self._describe(rank)
            )

    def _describe(self, rank: int) -> str:
        """Name a rank and the place where it was seen last."""
        if rank not in self._peers:
            return self._name(rank)
        process, peer = self._processes[rank], self._peers[rank]
        age = time.monotonic() - peer.seen
        return (
            f"rank {rank} (process {process.number} on {process.host}, last seen "
            f"{age:.3g} s ago: {peer.place})"
        )

    def _name(self, rank: int) -> str:
        process = self._processes[rank]
        return f"rank {rank} (process {process.number} on {process.host})"


def _lost_with(group: Group, ranks: Collection[int]) -> set[int]:
    """Return the ranks of nodes whose agents are threads of some ranks."""
    gone: set[int] = set()
    if "agent" in group.named:
        for node in group.nodes:
            if node[0] in ranks:
                gone.update(node)
    return gone
