"""Threads that help with the pieces of one call.

Those of concurrent.futures take no work once the interpreter begins to end, but a
server makes updates until all ranks have left, and windows are freed after that.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_waiting: queue.SimpleQueue[_Piece] = queue.SimpleQueue()
_threads: list[threading.Thread] = []
_starting = threading.Lock()


def run_pieces(act: Callable[[Any], None], items: Iterable[Any], helpers: int) -> None:
    """Call ``act`` for each item, on this thread and on helpers; wait for all.

    Args:
        act: May be called at the same time for different items.
        items: One at least.
        helpers: Threads besides this one. It does their work if none can be started,
            as while the interpreter ends.
    """
    own, *others = items
    alone = not _start(helpers)
    with contextlib.ExitStack() as rest:
        for item in others:
            piece = _Piece(act, item)
            rest.callback(piece.finish)
            if not alone:
                _waiting.put(piece)
        act(own)


class _Piece(Future[None]):
    """One call, made by the first thread that is free."""

    def __init__(self, act: Callable[[Any], None], item: Any) -> None:
        super().__init__()
        self._act, self._item = act, item

    def run(self) -> None:
        """Make the call, unless the other thread has taken it back."""
        if not self.set_running_or_notify_cancel():
            return
        try:
            self.set_result(self._act(self._item))
        except BaseException as error:
            self.set_exception(error)

    def finish(self) -> None:
        """Make the call if nobody has begun it; else wait, and raise what it raised."""
        if self.cancel():
            self._act(self._item)
        else:
            self.result()


def _start(count: int) -> int:
    """Have ``count`` helpers, or as many as can be started; return how many."""
    with _starting:
        # None is alive after a fork.
        _threads[:] = [thread for thread in _threads if thread.is_alive()]
        with contextlib.suppress(RuntimeError):
            while len(_threads) < count:
                thread = threading.Thread(target=_help, name="hpcaccum", daemon=True)
                thread.start()
                _threads.append(thread)
        return len(_threads)


def _help() -> None:
    while True:
        _waiting.get().run()
