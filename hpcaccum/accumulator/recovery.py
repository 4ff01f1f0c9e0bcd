"""Cleanup after a call that raised: at once, or before the next call."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, TypeVar

from hpcaccum.deadline import Deadline
from hpcaccum.errors import WaitTimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpcaccum.nodes import Calls

T = TypeVar("T")

# After an interruption, seconds to wait for the answer of an agent. Usually it is on
# its way. If not, a user who presses Ctrl-C must get the program back.
_GRACE = 1.0


class Recovery:
    """Recovers from an exception in a call, so that other ranks can go on.

    Used where a gradient is submitted: by a `Writer` and a `BoundedStalenessInbox`.

    Args:
        recover: Completes or revokes what the call has begun; may be called again.
        remote: How the call asks an agent; None if it does not.
        call: Name of the call, for messages.
    """

    def __init__(
        self, recover: Callable[..., None], remote: Calls | None, call: str
    ) -> None:
        self._recover, self._remote, self._call = recover, remote, call
        # What `recover` is called with, of a call that has raised.
        self._left: tuple[Any, ...] | None = None

    @property
    def pending(self) -> bool:
        """Whether a call has raised and is not recovered."""
        return self._left is not None

    def run(self, do: Callable[[], T], *args: Any) -> T:
        """Return the result of a function; if it raises, recover with ``args``."""
        try:
            return do()
        except BaseException as error:
            self._left = args
            # A signal handler may raise again, and no other rank can do this.
            try:
                self._recover_soon(error)
            except BaseException:
                self._recover_soon(error)
                raise
            raise

    def finish(self, deadline: Deadline | None = None) -> None:
        """Recover from the last call, if that was not possible at the time."""
        if self.pending:
            self._extend(deadline or Deadline(None, self._call))
            self._finish()

    def _recover_soon(self, error: BaseException) -> None:
        """Recover, unless this would wait for the answer of an agent for long."""
        if isinstance(error, WaitTimeoutError):
            return
        self._extend(Deadline(_GRACE, self._call))
        with contextlib.suppress(WaitTimeoutError):
            self._finish()

    def _extend(self, deadline: Deadline) -> None:
        if self._remote is not None:
            self._remote.extend(deadline)

    def _finish(self) -> None:
        if (left := self._left) is not None:
            self._recover(*left)
            self._left = None
