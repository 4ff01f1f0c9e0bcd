"""The lifetime of collective objects: each is freed once, at the latest by the end.

While there are objects on a group, its communicators are kept, and its heartbeat finds
ranks that are lost.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, cast

from hpcaccum.deadline import current_wait
from hpcaccum.errors import FreedError, LostRankError
from hpcaccum.mpi.job import shutdown
from hpcaccum.mpi.job.launcher import ends_job_at_output
from hpcaccum.mpi.life.heartbeat import Heartbeat
from hpcaccum.mpi.talk.creation import seconds_waiting

if TYPE_CHECKING:
    from types import TracebackType
    from typing import NoReturn

    from typing_extensions import Self

    from hpcaccum.mpi.talk.group import Group

logger = logging.getLogger("hpcaccum")

# Seconds after which a call of MPI for all ranks waits for one that is lost.
_BLOCKED = 1.0
_NAME = "objects"


class Freeable:
    """An object whose `free` is collective, and has an effect once.

    A subclass overrides `_free`, and `_describe` for messages. If it must be freed
    before MPI_Finalize, it calls `_register` when it is complete.

    Attributes:
        label: Name with a number, which tells objects of one name apart and is the same
            on all ranks. Set by `_register`.
    """

    label: str
    _freed = False
    _retained: Group | None = None

    def _register(self, group: Group, label: str) -> None:
        """Have the object freed before MPI_Finalize. Collective.

        From now on the heartbeat of the group calls `place`.
        """
        self.label = label
        Objects.of(group).add(self)
        self._retained = group
        shutdown.at_exit(self._free_once, group.order)

    @property
    def freed(self) -> bool:
        """Whether it has been freed."""
        return self._freed

    def _check_open(self) -> None:
        """Raise FreedError if it has been freed."""
        if self.freed:
            raise FreedError(f"{self._describe()} was freed")

    def _describe(self) -> str:
        """Return what messages call the object."""
        return type(self).__name__

    def place(self) -> str:
        """Return how far this rank is, for messages; "" if the object has no steps.

        Any thread may call it, at any time; so it must not call MPI.
        """
        return ""

    def needs(self, rank: int) -> bool:
        """Whether the job cannot go on with the object once a rank is lost."""
        return True

    def lose(self, rank: int) -> None:
        """Note that a rank is lost; called by the thread of the heartbeat."""

    def free(self) -> None:
        """Free it. Collective. A second call does nothing.

        If an exception, such as a timeout, has ended the first one, it does the rest.
        """
        self._free_once()
        shutdown.forget(self._free_once)

    def _free_once(self) -> None:
        if not self._freed:
            self._free_or_leave()
            self._freed = True
        if self._retained is not None:
            Objects.of(self._retained).remove(self)
            self._retained = None

    def _free(self) -> None:
        """Free what it holds. If this raises, the object is still open."""
        raise NotImplementedError

    def _free_or_leave(self) -> None:
        group = self._retained
        if group is None or not group.lost:
            try:
                self._free()
            except LostRankError:
                if group is None:
                    raise
                group.await_loss(f"{self._describe()}: free")
            else:
                return
        self._end_after_loss()

    def _end_after_loss(self) -> None:
        """Do what `_free` does for others, without MPI's collective calls."""

    def __reduce__(self) -> NoReturn:
        """Refuse to be copied or pickled: a copy would be known to this rank only."""
        saved = "; snapshot() returns what can be saved"
        raise TypeError(
            f"{self._describe()} cannot be copied or pickled, because "
            f"all ranks share it"
            f"{saved * hasattr(self, 'snapshot')}"
        )

    def __enter__(self) -> Self:
        """Return the object itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Free it. After an exception leave it open: other ranks may not free it."""
        if kind is None:
            self.free()


class Objects:
    """The objects on one group, and its heartbeat: until the last of them is freed."""

    def __init__(self, group: Group) -> None:
        self._group = group
        # Those that are not freed.
        self._open: list[Freeable] = []
        self._heartbeat: Heartbeat | None = None
        # Whether the user has freed the communicator.
        self._closed = False

    @classmethod
    def of(cls, group: Group) -> Objects:
        """Return those of a group."""
        if _NAME not in group.named:
            made = group.named[_NAME] = cls(group)
            group.closers.append(made._end_watch)
        return cast(Objects, group.named[_NAME])

    def watch(self) -> None:
        """Start the heartbeat, unless there is one. Collective."""
        if self._heartbeat is None and self._group.size > 1:
            self._heartbeat = Heartbeat(self._group, self._place, self._lose)
            shutdown.at_end(self._end_watch, self._group.order)

    def _end_watch(self) -> None:
        if self._heartbeat is not None:
            self._heartbeat.stop()
            self._heartbeat = None
            shutdown.forget(self._end_watch)

    def add(self, made: Freeable) -> None:
        """Keep the group, also if the user frees the communicator. Collective."""
        self.watch()
        self._open.append(made)

    def remove(self, freed: Freeable) -> None:
        """End an `add`. Collective. After an exception it can be called again."""
        if self._open == [freed]:
            self._end_watch()
        # An earlier call may have timed out.
        if freed in self._open:
            self._open.remove(freed)
        self._free_if_unused()

    def close(self) -> None:
        """Free the group after the last `remove`; the communicator is freed."""
        self._closed = True
        self._free_if_unused()

    def _free_if_unused(self) -> None:
        # After a loss the communicators are kept, which cannot be freed.
        if self._closed and not self._open and not self._group.lost:
            self._group.free()

    def _place(self) -> str:
        """Return where this rank is, for messages; any thread may call it."""
        steps = [each.place() for each in list(self._open)]
        wait = current_wait(threading.main_thread().ident)
        state = f"waiting in {wait.what}" if wait else "computing or in MPI"
        return ", ".join([*filter(None, steps), state])

    def _lose(self, found: dict[int, str]) -> None:
        """Note that ranks are lost; called by the thread of the heartbeat."""
        group, objects = self._group, list(self._open)
        group.dead |= {r for r in group.mates & found.keys() if not group.exists(r)}
        with group.control.lock:
            group.lost |= found
        shutdown.note_loss()
        for rank, text in found.items():
            # Rank 0 decides about the others, and leads their exchanges.
            needed = rank in (0, group.rank)
            if needed or any(each.needs(rank) for each in objects):
                shutdown.end_process_soon(text)
        # Any output would make that launcher end the job.
        if group.rank == 0 and not ends_job_at_output():
            present = group.size - len(group.lost)
            for text in found.values():
                logger.warning("%s; %d of %d ranks go on", text, present, group.size)
        for each in objects:
            for rank in found:
                each.lose(rank)
        if seconds_waiting() > _BLOCKED:
            shutdown.end_process(next(iter(group.lost.values())))
