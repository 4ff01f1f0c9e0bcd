"""The end of a program: free what is open, or abort the job.

After a rank is lost, MPI_Finalize would wait for it, as would collective calls. A
program then ends without them (`note_loss`); or it ends with the status `RESTART` if
it cannot go on (`end_process_soon`).

MPI_Finalize hangs on a window that was not freed, so all open objects are closed
before it (`at_exit`). A rank that ends with an exception leaves the others waiting
without end, so an uncaught exception aborts the job (`install_excepthook`).
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any, NamedTuple, NoReturn

from hpcaccum.deadline import end_waits, reason_to_end
from hpcaccum.errors import (
    RESTART,
    DisagreementError,
    LostRankError,
    WaitTimeoutError,
    is_echo,
)
from hpcaccum.mpi.job.launcher import is_rank, launched_ranks

# Seconds in which another rank, which raises the same error, may end the job. So only
# the rank with the best traceback prints it; but its program may catch the error.
_OTHER = 5
# Seconds that a launcher needs to forward a traceback, with a margin.
_FORWARDING = 0.2
# Seconds after which a process that could not abort the job ends alone: MPI may wait
# for a node that is cut off.
_ABORT = 10
# Seconds for which a program may go on after a loss that ends it: to handle the error.
_LAST = 30

# `Group.order`
Order = tuple[int, str]
_FIRST = (0, "")


class _Closer(NamedTuple):
    """What is called at the end, largest first: what objects share comes last."""

    own: bool
    order: Order
    close: Callable[[], None]


_open: list[_Closer] = []
_ending = False
# The process that installed what is below. A child that it forks inherits that, and
# must leave MPI alone.
_process = 0
# Whether a rank is lost; and the status with which the program has called sys.exit.
_lossy, _status = False, 0


def prepare_shutdown(module: Any) -> None:
    """Install what ends a program that uses MPI. Called once, when MPI is loaded."""
    # It is replaced, for programs that call it. An attribute of COMM_SELF, which it
    # deletes first, would come too late: a thread of ours that still calls MPI then
    # makes MPICH fail.
    finalize = module.Finalize

    def close_and_finalize() -> None:
        _close_all()
        if not _lossy:
            finalize()

    module.Finalize = close_and_finalize
    atexit.register(_close_at_exit)
    _note_status()
    install_excepthook()


def _note_status() -> None:
    """Note the status of the program, of which a handler of atexit is not told."""
    leave = sys.exit

    def leave_with(status: Any = None, /) -> NoReturn:
        global _status
        _status = status if isinstance(status, int) else int(status is not None)
        leave(status)

    sys.exit = leave_with


def _close_at_exit() -> None:
    _close_all()
    if _lossy and os.getpid() == _process:
        _leave(_status)


def note_loss() -> None:
    """End this program without MPI_Finalize, as a rank is lost."""
    global _lossy
    _lossy = True


def end_process_soon(reason: str) -> None:
    """Have all waits raise LostRankError; end this process if it does not end itself.

    It may be in a call of MPI that never returns.
    """
    if reason_to_end() is None:
        end_waits(reason)
        timer = threading.Timer(_LAST, end_process, [reason])
        timer.daemon = True
        timer.start()


def end_process(reason: str) -> None:
    """Print why this rank ends; end it, such that the job is started again."""
    _report(f" {reason}\n", "ends")
    _leave(RESTART)


def _leave(status: int) -> None:
    _flush()
    os._exit(status)


def install_excepthook() -> None:
    """Make an uncaught exception of this process end the whole MPI job.

    This happens when hpcaccum first uses MPI; and when it is imported, if a launcher
    that it knows has started this process as one of several ranks. A program that fails
    earlier, or under another launcher, may call this first.

    An interactive session, and a hook that the program has set, are left alone. In a
    program that a rank starts, or a child that it forks, an exception ends that process
    only.
    """
    global _process
    _process = os.getpid()
    if sys.excepthook is sys.__excepthook__ and not hasattr(sys, "ps1"):
        sys.excepthook = report_and_abort


def at_exit(close: Callable[[], None], order: Order) -> None:
    """Have ``close`` called before MPI_Finalize, last registered first.

    Threads register what they make in any order, so that of groups of a greater
    ``order`` comes first.
    """
    _open.append(_Closer(True, order, close))


def at_end(close: Callable[[], None], order: Order = _FIRST) -> None:
    """Have ``close`` called after all that was registered by `at_exit`."""
    _open.append(_Closer(False, order, close))


def forget(close: Callable[[], None]) -> None:
    """Undo an `at_exit` or `at_end`; do nothing if ``close`` was called already."""
    # From a copy, as other threads change the list.
    for each in [each for each in tuple(_open) if each.close == close]:
        _open.remove(each)


def count_open() -> int:
    """Return how many objects of this process are to be closed by `at_exit`."""
    return sum(each.own for each in tuple(_open))


def is_ending() -> bool:
    """Whether this program has come to its end, and closes what it left open."""
    return _ending


def _close_all() -> None:
    """Close all open objects. Collective, as all ranks close in the same order."""
    global _ending
    if os.getpid() != _process:
        return
    _ending = True
    if _lossy and (reason := reason_to_end()):
        end_process(reason)
    if _lossy:
        # What objects share are windows: only all ranks together can free them.
        _open[:] = [each for each in _open if each.own]
    while _open and not sys.modules["mpi4py.MPI"].Is_finalized():
        # The last one of those that are equal.
        last = max(reversed(tuple(_open)), key=lambda each: each[:2])
        _open.remove(last)
        try:
            last.close()
        except (DisagreementError, WaitTimeoutError) as error:
            # MPI_Finalize would hang on windows that the other ranks do not free.
            _report(f" at the end of its program: {error}\n")
            abort_job()
        except BaseException:
            report_and_abort(*sys.exc_info())


def abort_job(status: int = 1) -> None:
    """End all ranks now if there are others; return if this rank is alone."""
    _flush()
    module = _running() or _started_to_abort()
    if module is not None and module.COMM_WORLD.size > 1:
        # Launchers drop what they have not forwarded yet when a rank aborts.
        time.sleep(_FORWARDING)
        # A thread of C, which needs neither the interpreter lock nor a signal.
        with contextlib.suppress(OSError, RuntimeError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            faulthandler.dump_traceback_later(_ABORT, exit=True, file=nowhere)
        module.COMM_WORLD.Abort(status)
        # It returns if the launcher cannot be reached.
        os._exit(status)
    # This process ends without an abort, and nobody is left to free windows with.
    _open.clear()


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        # A closed one is None. Nothing may keep this rank from the end.
        with contextlib.suppress(AttributeError, OSError, ValueError):
            stream.flush()


def _running() -> Any:
    """Return mpi4py's module if MPI is initialized here and not finalized."""
    module = sys.modules.get("mpi4py.MPI")
    if os.getpid() != _process or module is None:
        return None
    if not module.Is_initialized() or module.Is_finalized():
        return None
    return module


def _started_to_abort() -> Any:
    """Return MPI, initialized only to abort the job."""
    # MPICH's mpiexec leaves ranks waiting in MPI_Init for one that exited before it.
    if os.getpid() != _process or launched_ranks() == 1 or not is_rank():
        return None
    with contextlib.suppress(ImportError, RuntimeError):
        from mpi4py import MPI

        if MPI.Is_finalized():
            return None
        if not MPI.Is_initialized():
            MPI.Init()
        return MPI
    return None


def report_and_abort(
    kind: type[BaseException] | None,
    error: BaseException | None,
    trace: TracebackType | None,
) -> None:
    """Print an exception with the number of the rank, then end the job.

    In the main thread, it returns if this rank is alone. It ends a child that this rank
    has forked, and not the job. If a rank is lost, each rank ends itself.
    """
    if isinstance(error, LostRankError):
        # The main thread gets the same error from its next wait.
        if threading.current_thread() is threading.main_thread():
            end_process(str(error))
        return
    if is_echo(error):
        time.sleep(_OTHER)
    text = "\n" + "".join(traceback.format_exception(kind, error, trace))
    if isinstance(error, KeyboardInterrupt):
        # Ctrl-C interrupts all ranks: one line from each is enough.
        text = " KeyboardInterrupt\n"
    _report(text)
    abort_job()
    # The main thread would wait for this one without end; and in a child that was
    # forked, mpi4py would call MPI_Finalize, which waits for other ranks.
    forked = os.getpid() != _process and "mpi4py.MPI" in sys.modules
    if forked or threading.current_thread() is not threading.main_thread():
        os._exit(1)


def or_abort(act: Callable[[], object]) -> Callable[[], None]:
    """Return what acts in a thread for which others wait: an exception ends the job."""

    def run() -> None:
        try:
            act()
        except BaseException:
            report_and_abort(*sys.exc_info())

    return run


def abort_because(reason: str) -> None:
    """Print a reason with the number of the rank, then end the job."""
    _report(f" {reason}\n")
    abort_job()


def _report(text: str, what: str = "failed, ending the job") -> None:
    """Print why this rank ends the job, or only itself."""
    module = _running()
    if module is not None:
        rank, size = module.COMM_WORLD.rank, module.COMM_WORLD.size
        if size > 1:
            text = f"rank {rank} of {size} {what}:{text}"
    # One write, as other ranks may print at the same time.
    if sys.stderr:
        sys.stderr.write(text.lstrip())
