"""The lifetime of a collective object: it is freed once, at the latest by the end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpcaccum.deadline import Deadline
from hpcaccum.errors import FreedError, LostRankError
from hpcaccum.mpi import shutdown

if TYPE_CHECKING:
    from types import TracebackType
    from typing import NoReturn

    from typing_extensions import Self

    from hpcaccum.mpi.group import Group


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

        Args:
            group: Its communicators are kept until the object is freed. From now on its
                heartbeat calls `place`.
            label: See the attribute.
        """
        self.label = label
        group.retain(self)
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
            self._retained.release(self)
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
                # Rank 0 has told this call of a loss; its heartbeat tells it, too.
                deadline = Deadline(None, f"{self._describe()}: free")
                deadline.wait(lambda: group.lost or None, lambda: "the heartbeat")
            else:
                return
        self._end_after_loss()

    def _end_after_loss(self) -> None:
        """Do what `_free` does for others, without MPI's collective calls.

        Memory stays as it is: it cannot be freed without the ranks that are lost.
        """

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
