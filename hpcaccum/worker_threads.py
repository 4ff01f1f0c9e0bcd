"""Threads that share the work of one call.

Those of concurrent.futures accept no work once the interpreter begins to shut down. A
server makes updates even then, until all ranks have left.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any

_waiting: queue.SimpleQueue[_Piece] = queue.SimpleQueue()
_threads: list[threading.Thread] = []
# Reentrant, for a signal handler that saves.
_starting = threading.RLock()


def run_pieces(act: Callable[[Any], None], items: Iterable[Any], helpers: int) -> None:
    """Call ``act`` for each item, on this thread and on helpers; wait for all calls."""
    own, *others = items
    pieces = [_Piece(act, item) for item in others]
    with contextlib.ExitStack() as rest:
        for piece in pieces:
            rest.callback(piece.finish)
        if _start(helpers):
            for piece in pieces:
                _waiting.put(piece)
        act(own)


def run_elsewhere(act: Callable[[], None], times: int) -> Sequence[Future[None]]:
    """Call ``act`` on other threads only; return the calls, which run meanwhile.

    Signal handlers run on the main thread only, so none interrupts these calls. If no
    thread can be started, as during interpreter shutdown, this thread makes one call.
    """
    if times and not _start(times):
        act()
        return ()
    calls = [_Piece(lambda _: act(), None) for _ in range(times)]
    for call in calls:
        _waiting.put(call)
    return calls


class _Piece(Future[None]):
    """One call, made by the first free thread."""

    def __init__(self, act: Callable[[Any], None], item: Any) -> None:
        super().__init__()
        self._act, self._item = act, item

    def run(self) -> None:
        """Make the call, unless the caller has cancelled it."""
        if not self.set_running_or_notify_cancel():
            return
        try:
            self.set_result(self._act(self._item))
        except BaseException as error:
            self.set_exception(error)

    def finish(self) -> None:
        """Make the call if no helper has begun it; else wait, and raise its error."""
        if self.cancel():
            self._act(self._item)
        else:
            self.result()


def _start(count: int) -> int:
    """Start helpers until there are ``count``, if possible; return their number."""
    with _starting:
        # After a fork no thread is alive.
        _threads[:] = [thread for thread in _threads if thread.is_alive()]
        with contextlib.suppress(RuntimeError):
            for _ in range(count - len(_threads)):
                thread = threading.Thread(
                    target=_help, name="hpcaccum worker", daemon=True
                )
                thread.start()
                _threads.append(thread)
        return len(_threads)


def _help() -> None:
    while True:
        _waiting.get().run()
