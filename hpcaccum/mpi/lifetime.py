"""What is freed once: when asked to, at the end of a ``with`` block, or at exit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpcaccum.errors import FreedError
from hpcaccum.mpi import shutdown

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from typing_extensions import Self

    from hpcaccum.mpi.group import Group


class Freeable:
    """An object whose `free` is collective, and happens once.

    A subclass overrides `_free`. Once it is complete it may call `_register`: it is
    then freed before MPI_Finalize if nobody freed it.
    """

    _freed = False
    _group_in_use: Group | None = None

    def _register(self, group: Group, what: str) -> None:
        """Keep the group's communicators, and free this object at the end.

        Args:
            group: Whose communicators `_free` needs.
            what: Name for messages; gets a number.
        """
        self.label = f"{what} (number {group.next_number()})"
        group.retain()
        self._group_in_use = group
        shutdown.at_exit(self._free_once)

    @property
    def freed(self) -> bool:
        """Whether it was freed."""
        return self._freed

    def _check_open(self) -> None:
        if self._freed:
            raise FreedError(f"{self._describe()} was freed")

    def _describe(self) -> str:
        """Return how messages call it."""
        return type(self).__name__

    def free(self) -> None:
        """Free it. Collective. Calling it again does nothing."""
        self._free_once()
        shutdown.forget(self._free_once)

    def _free_once(self) -> None:
        if self._freed:
            return
        self._free()
        self._freed = True
        if self._group_in_use is not None:
            self._group_in_use.release()

    def _free(self) -> None:
        """Free what it holds; if that raises, it is still open."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        """Return the object itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Free it; after an exception the others may not come, so leave it open."""
        if kind is None:
            self.free()


class Opened:
    """Frees something collective once: when asked to, or before MPI_Finalize.

    Args:
        group: Whose communicators are needed until then.
        free: Frees it; if that raises, it is still open.
        what: Its name.

    Attributes:
        label: The name, with a number that is its own.
        closed: Whether it was freed.
    """

    def __init__(self, group: Group, free: Callable[[], None], what: str) -> None:
        self._group, self._free = group, free
        self.label = f"{what} (number {group.next_number()})"
        group.retain()
        shutdown.at_exit(self._close)
        self.closed = False

    def _close(self) -> None:
        if not self.closed:
            self._free()
            self.closed = True
            self._group.release()

    def close(self) -> None:
        """Run it, if it did not run yet."""
        self._close()
        shutdown.forget(self._close)
