"""A loop of a server, in a thread of its own or in the thread that calls `run`."""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING

from hpcaccum.errors import BrokenObjectError
from hpcaccum.mpi import report_and_abort
from hpcaccum.server.role import Role

if TYPE_CHECKING:
    from hpcaccum.deadline import Deadline


class Background(Role):
    """The base of the roles of servers, each with a loop, `run`."""

    _thread: threading.Thread | None = None
    # Whether an update has begun to change the center and not ended.
    _broken = False

    def _check_whole(self) -> None:
        """Raise BrokenObjectError if an exception has ended an update."""
        if self._broken:
            raise BrokenObjectError(
                "an exception has ended an update, and the parameters are now partly "
                "updated: continue from a checkpoint"
            )

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
