"""Scripts that all ranks run, in which one rank acts, or all do.

`at` makes one rank act while the others wait for it, so that a test reads like a
program of one process although its lines run on different ranks. What the rank returned
or raised is returned or raised on all: all ranks check the same, and fail together.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import pytest
from mpi4py import MPI

import hpcaccum as hpc
from hpcaccum.deadline import current_wait
from tests import internals

from ..common import VAIN as VAIN
from ..common import same_bits as same_bits
from .support import WAIT, meet


def at(rank: int, do: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Have one rank (modulo their number) act. Collective."""
    rank %= MPI.COMM_WORLD.size
    outcome = attempt(do, *args, **kwargs) if MPI.COMM_WORLD.rank == rank else None
    result, error = meet(outcome)[rank]
    if error is not None:
        raise error
    return result


def everywhere(do: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
    """Have all ranks act at the same time; return the results. Collective."""
    meet()
    outcome = meet(attempt(do, *args, **kwargs))
    for _, error in outcome:
        if error is not None:
            raise error
    return [result for result, _ in outcome]


def attempt(do: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """Return a result and None, or None and what was raised."""
    try:
        return do(*args, **kwargs), None
    except Exception as error:
        return None, error


def interrupted(do: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Have a call end with a KeyboardInterrupt while it waits."""
    main, ended = threading.main_thread().ident, threading.Event()

    def waits() -> bool:
        wait = current_wait(main)
        return ended.is_set() or (wait is not None and wait.elapsed > VAIN)

    def interrupt() -> None:
        until(waits)
        if not ended.is_set():
            signal.pthread_kill(main, signal.SIGALRM)

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, stop)
    thread = threading.Thread(target=interrupt)
    try:
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            do(*args, **kwargs)
    finally:
        ended.set()
        thread.join()
        signal.signal(signal.SIGALRM, before)


def until(fact: Callable[[], Any]) -> Any:
    """Wait until something is true; return it."""
    limit = time.monotonic() + WAIT
    while not (result := fact()):
        assert time.monotonic() < limit, "waited in vain"
        time.sleep(0.0005)
    return result


def in_threads(*jobs: Callable[[], Any]) -> list[Any]:
    """Run jobs at once; return their results."""
    with ThreadPoolExecutor(len(jobs)) as pool:
        return [*pool.map(lambda job: job(), jobs)]


class Background:
    """A call in a thread of one rank while the ranks continue. Collective."""

    def __init__(self, rank: int, do: Callable[[], Any]) -> None:
        self.rank = rank % MPI.COMM_WORLD.size
        self.outcome: tuple[Any, Any] | None = None
        self.thread = threading.Thread(target=self._run, args=(do,), daemon=True)
        if MPI.COMM_WORLD.rank == self.rank:
            self.thread.start()

    def _run(self, do: Callable[[], Any]) -> None:
        self.outcome = attempt(do)

    def over(self) -> bool:
        """Whether it has ended. Collective."""
        return meet(self.outcome is not None)[self.rank]

    def result(self) -> Any:
        """Wait for its end; return its result or raise its exception. Collective."""
        if MPI.COMM_WORLD.rank == self.rank:
            self.thread.join(2 * WAIT)
        outcome = meet(self.outcome)[self.rank]
        assert outcome is not None, f"a thread of rank {self.rank} does not end"
        result, error = outcome
        if error is not None:
            raise error
        return result


class Take(Background):
    """A take on one rank; on return it waits in line, or for gradients, or is over."""

    def __init__(
        self,
        acc: hpc.ConditionalAccumulator,
        rank: int,
        required: int,
        timeout: float = WAIT,
    ) -> None:
        super().__init__(rank, lambda: acc.take_grad(required, timeout=timeout))
        if MPI.COMM_WORLD.rank == self.rank:
            until(lambda: self.outcome or internals.is_in_line(acc, self.rank))
        meet()
        settle(acc)


def settle(acc: hpc.ConditionalAccumulator) -> None:
    """Wait until every take that can be served has been. Collective."""
    ranks = range(MPI.COMM_WORLD.size)

    def settled() -> bool:
        return internals.take_waits(acc) or not any(
            internals.is_in_line(acc, rank) for rank in ranks
        )

    at(0, until, settled)


class Admitted:
    """A gradient of a rank that was admitted and is not written. Collective."""

    def __init__(self, acc: hpc.ConditionalAccumulator, rank: int) -> None:
        self._rank = rank % MPI.COMM_WORLD.size
        if MPI.COMM_WORLD.rank == self._rank:
            self._write = internals.admit(acc)
        meet()

    def write(self, gradient: Any) -> None:
        """Write it. Collective."""
        at(self._rank, lambda: self._write(gradient))


def close_unreduced(acc: hpc.ConditionalAccumulator) -> None:
    """Close a round and fail to reduce it, so that it stays on record."""
    with internals.fail("sum", acc, MemoryError), pytest.raises(MemoryError):
        acc.take_grad(1, timeout=WAIT)


class Makers:
    """Makes accumulators that the tests of a module reuse.

    Attributes:
        all: All objects of this class.
    """

    all: ClassVar[list[Makers]] = []

    def __init__(self, kind: Callable[..., Any] = hpc.ConditionalAccumulator) -> None:
        self.all.append(self)
        self._kind = kind
        self._made: dict[str, Any] = {}
        self._used: dict[str, Any] = {}
        # Accumulators from which nothing can be taken any more.
        self._ruined: list[Any] = []

    def __call__(
        self, dtype: Any = "float64", shape: Any = (2,), **options: Any
    ) -> Any:
        """Return one with step 0 and nothing accumulated, on all ranks. Collective."""
        key = repr((dtype, shape, sorted(options.items())))
        assert key not in self._used, "two alike in one test: give one a name"
        acc = self._made.pop(key, None)
        if acc is None:
            acc = self._kind(dtype, shape, **options)
        self._used[key] = acc
        return acc

    def take_back(self) -> None:
        """Empty the accumulators that were used, if that is possible. Collective."""
        for key, acc in self._used.items():
            outcome = attempt(renew, acc) if MPI.COMM_WORLD.rank == 0 else None
            _, error = meet(outcome)[0]
            if error is None:
                self._made[key] = acc
            else:
                self._ruined.append(acc)
        self._used.clear()

    def free(self) -> None:
        """Free what is not in use: agents look at all windows there are. Collective."""
        for acc in [*self._made.values(), *self._ruined]:
            acc.free()
        self._made.clear()
        self._ruined.clear()


def renew(acc: hpc.ConditionalAccumulator) -> None:
    """Empty an accumulator and set its step to 0; a closed round may be left over."""
    while acc.num_accumulated():
        acc.take_grad(1, timeout=1.0)
    acc.set_global_step(0)


MAKERS = Makers()


@pytest.fixture(name="make")
def make_fixture() -> Any:
    """Accumulators that earlier tests may have used; not to be freed, nor left."""
    yield MAKERS
    MAKERS.take_back()


@pytest.fixture(name="acc", params=["slots", "sum"])
def acc_fixture(
    request: pytest.FixtureRequest, make: Makers
) -> hpc.ConditionalAccumulator:
    """An accumulator of float64 vectors of 2, with either storage."""
    return make(storage=request.param)
