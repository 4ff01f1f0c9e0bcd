"""A limit for calls that block inside MPI, where no `Deadline` reaches them."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, TypeVar

from hpcaccum.deadline import Deadline
from hpcaccum.errors import WaitTimeoutError
from hpcaccum.mpi.job.shutdown import abort_because

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


def limited(call: Callable[[], T], what: str, missing: str) -> T:
    """Return what a call returns; warn while it blocks, and end the job at the limit.

    Args:
        call: It lets other threads of Python run while it blocks.
        what: The call, as the user knows it.
        missing: What is waited for.
    """
    # In the main thread, as it raises if the limit is invalid.
    deadline = Deadline(None, what)
    blocks = threading.Lock()
    blocks.acquire()
    watch = threading.Thread(
        target=_watch, args=(deadline, blocks, missing), daemon=True, name=what
    )
    try:
        watch.start()
        return call()
    finally:
        blocks.release()
        if watch.is_alive():
            watch.join()


def _watch(deadline: Deadline, blocks: threading.Lock, missing: str) -> None:
    try:
        deadline.acquire(blocks, lambda: missing)
    except WaitTimeoutError as error:
        abort_because(str(error))
