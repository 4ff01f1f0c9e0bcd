"""A loop of a server, in a thread of its own or in the thread that calls `run`."""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING

from hpcaccum.mpi import report_and_abort
from hpcaccum.server.role import Role

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpcaccum.deadline import Deadline


class Background(Role):
    """The base of the roles of servers, each with a loop, `run`.

    It makes each change of the center once, also if `run` is interrupted and called
    again.
    """

    _thread: threading.Thread | None = None
    # The number of the last change that has begun, and of the last one made.
    _begun = _made = -1

    def _make_once(
        self, number: int, prepare: Callable[[], Callable[[], object] | None]
    ) -> bool:
        """Make a change of the center, unless `run` made it before an interruption.

        Returns:
            Whether the change is made.
        """
        if self._made == number:
            return True
        if self._begun == number:
            raise RuntimeError(
                "an update failed or was interrupted while it changed the parameters, "
                "which are now partly updated: continue from a checkpoint"
            )
        change = prepare()
        if change is None:
            return False
        self._begun = number
        change()
        self._made = number
        return True

    def start_thread(self) -> None:
        """Run the loop in a thread, unless it has one."""
        if self._thread is not None:
            return
        name = f"server ({type(self).__name__})"
        self._thread = threading.Thread(
            target=self._run_or_abort, daemon=True, name=name
        )
        self._thread.start()

    def _run_or_abort(self) -> None:
        try:
            self.run()
        except BaseException:
            # Without this thread every rank would wait for its update.
            report_and_abort(*sys.exc_info())

    def end(self, deadline: Deadline) -> None:
        """Wait until the thread has ended, if there is one; see `Role.end`."""
        if self._thread is not None:
            deadline.join(self._thread, self._unfinished)

    def _unfinished(self) -> str:
        """Return what the thread has to do, for messages."""
        raise NotImplementedError
