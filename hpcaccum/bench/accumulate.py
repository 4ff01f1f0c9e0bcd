"""The ConditionalAccumulator, compared with MPI_Put and MPI_Accumulate."""

from __future__ import annotations

import functools
import time
from typing import Any

import numpy as np

from hpcaccum import ConditionalAccumulator
from hpcaccum.bench.measure import (
    NEVER_STALE,
    Case,
    Memory,
    WrongAnswerError,
    apart,
    check_equal,
    gradient,
    of_one,
    repeated,
)
from hpcaccum.deadline import Deadline
from hpcaccum.dtypes import Array
from hpcaccum.mpi import Region

# A local step that is always stale.
_STALE = -1
# Seconds that a rank computes in the rows with a late rank, and how many times longer
# the late one computes.
_COMPUTES, _LATE = 1e-3, 10


class Accumulate(Case):
    """One accumulator: all ranks apply gradients, rank 0 takes.

    - ``round``: every rank applies a gradient in its slot, rank 0 takes the mean, and
      the others see the next step. The time is that of rank 0, as the others continue
      while it sums. It reads n gradients and writes one: n + 1 times the bytes.
    - ``Accumulate``: the same with MPI_Accumulate into rank 0, a barrier, a copy of the
      mean, zeroing, a barrier.
    - ``apply``: all ranks apply a gradient that is not in a slot. Each rank reads it
      and writes it to its slot: 2 n times the bytes.
    - ``Put``: the same bytes into rank 0 by MPI_Put and a flush.
    - ``exchange``: between N nodes, each sends the bytes to the next one. A round must
      send them over each link once; an apply need not send any.
    - ``copy``: a copy to private memory of this rank.
    - ``in slot``: apply of a gradient in its slot, which reads none of it; the cache is
      as the previous round left it.
    - ``stale``: an apply that is dropped; it sends nothing.
    - ``writers``: all ranks apply as fast as they can, and rank 0 takes whenever there
      are n gradients; the time of n gradients. Compared with ``Accumulate``.
    - ``4 of 4``: each rank computes for 1 ms, the last one for 10 ms; rank 0 takes the
      gradients of all.
    - ``3 of 4``: the same, but rank 0 does not wait for the last rank.
    """

    help = "the accumulator: applies, rounds, many writers, a late rank"
    memory = Memory(shared=3, shared_all=1, private=6)

    def _prepare(self) -> None:
        n, group, grad = self.n, self.group, gradient(self.rank, self.count)
        self._grad, self._next, self._mean = grad, grad, self._result()
        self._pattern = gradient(0, self.count)
        self._accumulator = self._hold(
            ConditionalAccumulator("float32", (self.count,), comm=group)
        )
        # For the raw calls: rank 0 has one part for each rank.
        self._raw = self._hold(Region(group, 0, self.nbytes * n))
        self._step, self._dropped = 0, False
        mean, some = self._check_mean, self._check_some

        ours, raw = repeated(self._round), repeated(self._raw_round)
        floor = self._floor(n + 1, 1)
        self._add("round", of_one(group, ours), mean, raw="Accumulate", **floor)
        self._add("Accumulate", of_one(group, raw), mean, reference=True, **floor)

        floor = self._floor(2 * n, 0)
        anywhere = apart(lambda: self._ready(grad), self._apply, self._turn)
        in_slot = apart(
            lambda: self._ready(self._accumulator.slot()), self._apply, self._turn
        )
        put = repeated(lambda: self._raw.put(self.rank * self.nbytes, grad))
        self._add("apply", anywhere, mean, raw="Put", **floor)
        self._add("Put", put, self._check_put, reference=True, **floor)
        self._add_plain(self._result(), grad)
        self._add("in slot", in_slot, mean, raw="Put", bus=0)
        self._add("stale", repeated(self._drop), self._check_dropped, bus=0)

        self._add("writers", self._writers, some, raw="Accumulate", bus=0)
        for quorum in (n, n - 1) if n > 1 else ():
            late = functools.partial(self._late, quorum)
            self._add(f"{quorum} of {n}", late, some, bus=0)

    def _ready(self, grad: Array) -> None:
        self._next = grad
        self.comm.Barrier()

    def _apply(self) -> None:
        if not self._accumulator.apply_grad(self._next, self._step):
            raise WrongAnswerError("a gradient of the current step was dropped")

    def _turn(self) -> None:
        """End a round: rank 0 takes the mean, the others wait for the next step."""
        self._step += 1
        if self.rank == 0:
            self._take(self.n)
        else:
            self._wait_for(self._step)

    def _take(self, required: int) -> None:
        # Into existing memory, as MPI's calls do: new pages cost as much as a sum.
        self._mean = self._accumulator.take_grad(required, out=self._mean)

    def _wait_for(self, step: int) -> int:
        def reached() -> int | None:
            now: int = self._accumulator.global_step
            return now if now >= step else None

        return Deadline(None, "round").wait(reached, lambda: f"step {step}")

    def _round(self) -> None:
        self._next = self._accumulator.slot()
        self._apply()
        self._turn()

    def _raw_round(self) -> None:
        self._raw.accumulate(0, self._grad)
        self.comm.Barrier()
        if self.rank == 0:
            total = self._hosted(0)
            np.divide(total, np.float32(self.n), out=self._mean)
            total[:] = 0
        self.comm.Barrier()

    def _hosted(self, rank: int) -> Any:
        self._raw.sync()
        where = rank * self.nbytes
        return self._raw.view(where, self.count, np.dtype(np.float32))

    def _drop(self) -> None:
        self._dropped = not self._accumulator.apply_grad(self._grad, _STALE)

    def _finish(self) -> None:
        """Empty the accumulator, and bring all ranks to its step."""
        self.comm.Barrier()
        if self.rank == 0 and self._accumulator.num_accumulated():
            self._take(1)
        self._step = self.comm.bcast(self._accumulator.global_step)

    def _writers(self, rounds: int) -> list[float]:
        accumulator = self._accumulator
        begun = time.perf_counter()
        for _ in range(rounds):
            accumulator.apply_grad(self._grad, NEVER_STALE)
            if self.rank == 0 and accumulator.num_accumulated() >= self.n:
                self._take(self.n)
        self._finish()
        return [(time.perf_counter() - begun) / rounds]

    def _late(self, quorum: int, rounds: int) -> list[float]:
        last, step = self._step + rounds, self._step
        computes = _COMPUTES * (_LATE if self.rank == self.n - 1 else 1)
        begun = time.perf_counter()
        while step < last:
            time.sleep(computes)
            self._accumulator.apply_grad(self._grad, step)
            if self.rank == 0:
                self._take(quorum)
            step = self._wait_for(step + 1)
        seconds = time.perf_counter() - begun
        self._finish()
        # The time of rank 0, which does not wait for the late rank's last gradient.
        return [seconds / rounds] if self.rank == 0 else []

    def _check_mean(self) -> None:
        if self.rank == 0:
            check_equal(self._mean, self._pattern + np.float32((self.n - 1) / 2))

    def _check_some(self) -> None:
        """Check the mean of some of the gradients, which differ by a constant."""
        if self.rank == 0:
            rest = self._mean - self._pattern
            if not 0 <= rest.min() <= rest.max() <= self.n - 1:
                raise WrongAnswerError(f"a mean is off by {rest.min()} to {rest.max()}")

    def _check_put(self) -> None:
        for rank in range(self.n) if self.rank == 0 else ():
            check_equal(self._hosted(rank), self._pattern + np.float32(rank))

    def _check_dropped(self) -> None:
        if not self._dropped:
            raise WrongAnswerError("a stale gradient was accepted")

    def forget(self) -> None:
        """Overwrite the results, and fill the slots with this rank's gradient."""
        for _ in range(2):
            np.copyto(self._accumulator.slot(), self._grad)
            self._round()
        super().forget()
        self._dropped = False
        if self.rank == 0:
            for rank in range(self.n):
                self._hosted(rank)[:] = 0
            self._raw.sync()
        self.comm.Barrier()
