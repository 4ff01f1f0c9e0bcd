"""A claim that one call at a time has, among the threads of a rank."""

from __future__ import annotations

import threading

from hpcaccum.accumulator.one_thread import in_a_handler


class Claimant:
    """One call of this thread.

    Args:
        call: Its name, for messages.
    """

    def __init__(self, call: object) -> None:
        self.call, self.thread = call, threading.get_ident()


class Claim:
    """What one call at a time has; used by a `TicketLock` and takes from a device."""

    def __init__(self) -> None:
        # A dictionary is the lock between threads: an exception cannot hide whether
        # `setdefault` succeeded.
        self._first: dict[str, Claimant] = {}

    def make(self, mine: Claimant) -> bool | None:
        """Make a claim; return None while another thread has one."""
        first = self._first.setdefault("call", mine)
        if first is not mine and first.thread == mine.thread:
            raise in_a_handler(mine.call)
        return first is mine or None

    def is_of(self, mine: Claimant) -> bool:
        """Whether a call has the claim."""
        return self._first.get("call") is mine

    def end(self, mine: Claimant) -> None:
        """End the claim of a call, if it has it."""
        if self.is_of(mine):
            del self._first["call"]
