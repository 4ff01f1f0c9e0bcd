"""Waiting for what a thread of one rank of a node does."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpcaccum.wake import Wake

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpcaccum.deadline import Deadline


class Change:
    """Changes of memory of a node, which one thread makes and all its ranks wait for.

    Args:
        made_here: Whether a thread of this rank makes them. Its other threads then
            block: if they polled, they would take the interpreter from it.
    """

    def __init__(self, *, made_here: bool) -> None:
        self._made_here = made_here
        # Of each call of `wait` that blocks.
        self._blocked: list[Wake] = []

    def announce(self) -> None:
        """Wake the threads of this rank, after a change."""
        for each in list(self._blocked):
            each.wake()

    def wait(
        self,
        fact: Callable[[], bool],
        deadline: Deadline,
        missing: Callable[[], str],
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        """Wait until something is true."""
        if self._made_here:
            self._block(fact, deadline, missing)
            return

        def found() -> bool | None:
            if fact():
                return True
            if meanwhile is not None:
                meanwhile()
            return None

        deadline.wait(found, missing)

    def _block(
        self, fact: Callable[[], bool], deadline: Deadline, missing: Callable[[], str]
    ) -> None:
        announced = Wake()
        self._blocked.append(announced)
        try:
            deadline.block(announced.until(fact), missing)
        finally:
            self._blocked.remove(announced)
