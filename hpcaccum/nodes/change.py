"""Waiting for what a thread of one rank of a node does."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpcaccum.deadline import Deadline


class Change:
    """Changes of memory of a node, which one thread makes and all its ranks wait for.

    Args:
        made_here: Whether it is a thread of this rank. Other threads of this rank then
            block: if they polled, they would take the interpreter from it.
    """

    def __init__(self, *, made_here: bool) -> None:
        self._made_here = made_here
        self._condition = threading.Condition()

    def announce(self) -> None:
        """Wake the threads of this rank, after a change."""
        with self._condition:
            self._condition.notify_all()

    def wait(
        self,
        fact: Callable[[], bool],
        deadline: Deadline,
        missing: Callable[[], str],
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        """Wait until something is true.

        Args:
            fact: Whether it is.
            deadline: Of the call.
            missing: Returns what is waited for; called for messages only.
            meanwhile: Called again and again, unless this rank blocks.

        Raises:
            WaitTimeoutError: If the limit passes first.
        """

        def announced(seconds: float) -> bool | None:
            with self._condition:
                return self._condition.wait_for(fact, seconds) or None

        def found() -> bool | None:
            if fact():
                return True
            meanwhile()
            return None

        if self._made_here:
            deadline.block(announced, missing)
        else:
            deadline.wait(found, missing)
