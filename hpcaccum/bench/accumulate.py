"""The ConditionalAccumulator, compared with MPI_Put and MPI_Accumulate."""

from __future__ import annotations

import functools
import time
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from hpcaccum import ConditionalAccumulator
from hpcaccum.bench.measure import (
    Kind,
    Memory,
    WrongAnswerError,
    apart,
    check_equal,
    repeated,
    to_or_from_one,
)
from hpcaccum.bench.references import NEVER_STALE, RingExchange, gradient, plain_copy
from hpcaccum.deadline import Deadline
from hpcaccum.mpi import Region
from hpcaccum.nodes import NodeParts

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hpcaccum import Group
    from hpcaccum.bench.measure import Conditions, Run
    from hpcaccum.dtypes import Array

# A local step that is always stale.
_STALE = -1
# Seconds that a rank computes in the rows with a late rank, and how many times longer
# the late one computes.
_COMPUTES, _LATE = 1e-3, 10


class Accumulate:
    """One accumulator: all ranks apply gradients, rank 0 takes.

    - ``round``: every rank applies a gradient in its slot, rank 0 takes the mean, and
      the others see the next step. The time is that of rank 0, as the others continue
      while it sums. It reads n gradients and writes one: n + 1 times the bytes.
    - ``Accumulate``: the same with MPI_Accumulate into rank 0, a barrier, a copy of the
      mean, zeroing, a barrier.
    - ``apply``: all ranks apply a gradient that is not in a slot. Each rank reads it
      and writes it to its slot: 2 n times the bytes.
    - ``Put``: the same bytes into rank 0 by MPI_Put and a flush.
    - ``copy shared``: a copy to memory of this rank that rank 0 reads between two
      copies. A store to a cache line that another core has read must fetch it first, so
      an apply cannot be faster than this.
    - ``exchange``: between N nodes, each sends the bytes to the next one. A round must
      send them over each link once; an apply need not send any.
    - ``copy``: a copy to private memory of this rank.
    - ``in slot``: apply of a gradient in its slot, which reads none of it; the cache is
      as the previous round left it.
    - ``in slot warm``: the same after a small apply: the program is in the cache.
    - ``stale``: an apply that is dropped; it sends nothing.
    - ``writers``: all ranks apply as fast as they can, and rank 0 takes whenever there
      are n gradients; the time of n gradients. Compared with ``Accumulate``.
    - ``4 of 4``: each rank computes for 1 ms, the last one for 10 ms; rank 0 takes the
      gradients of all.
    - ``3 of 4``: the same, but rank 0 does not wait for the last rank.

    Args:
        group: The ranks.
        nbytes: Of a gradient.
    """

    least_ranks: ClassVar[int] = 1
    memory: ClassVar[Memory] = Memory(shared=3, shared_all=1, private=6)

    def __init__(self, group: Group, nbytes: int, _: Conditions) -> None:
        count = nbytes // 4
        self._group, self._nbytes = group, nbytes
        self._pattern, self._grad = gradient(0, count), gradient(group.rank, count)
        self._own, self._mean = np.zeros_like(self._grad), np.zeros_like(self._grad)
        self._spread = (group.size - 1) / 2
        self._accumulator = ConditionalAccumulator("float32", (count,), comm=group)
        # For the raw calls: rank 0 has one part for each rank.
        self._raw = Region(group, 0, nbytes * group.size)
        self._shared: NodeParts | None = None
        if group.single_node:
            self._shared = NodeParts(group, nbytes, "copy shared")
        self._exchange = RingExchange(group, nbytes)
        self._step = 0
        self.kinds = [*self._rounds(), *self._applies(), *self._loads()]

    def _rounds(self) -> list[Kind]:
        # Between nodes, the network is the limit, not memory.
        floor: Any = {"moves": (self._group.size + 1) * self._nbytes}
        if not self._shared:
            nodes = len(self._group.nodes)
            floor = {"crosses": to_or_from_one(nodes) * self._nbytes}
        ours, raw = self._on_root(self._round), self._on_root(self._raw_round)
        check = self._check_mean
        return [
            Kind("round", ours, check, raw="Accumulate", **floor),
            Kind("Accumulate", raw, check, reference=True, **floor),
        ]

    def _on_root(self, operation: Callable[[], object]) -> Run:
        """Return a run that reports the time of rank 0 only."""

        def run(inner: int) -> list[float]:
            seconds = repeated(operation)(inner)
            return seconds if self._group.rank == 0 else []

        return run

    def _applies(self) -> list[Kind]:
        n, check = self._group.size, self._check_mean
        floor = 2 * n * self._nbytes if self._shared else 0
        anywhere, cold, warm = (
            apart(before, self._apply, self._turn)
            for before in (self._no_slot, self._cold_slot, self._warm_slot)
        )
        put = repeated(self._put)
        shared = apart(lambda: None, self._copy_shared, self._read_shared)
        kinds = [
            Kind("apply", anywhere, check, raw="Put", moves=floor),
            Kind("Put", put, self._check_put, reference=True, moves=floor),
            Kind("copy shared", shared, check, reference=True, moves=floor),
            *self._exchange.kinds,
            plain_copy(self._own, self._grad, n),
            Kind("in slot", cold, check, raw="Put", bus=0),
            Kind("in slot warm", warm, check, raw="Put", bus=0),
            Kind("stale", repeated(self._drop), self._check_dropped, bus=0),
        ]
        return [kind for kind in kinds if self._shared or kind.name != "copy shared"]

    def _loads(self) -> list[Kind]:
        n, check = self._group.size, self._check_some
        everybody, most = f"{n} of {n}", f"{n - 1} of {n}"

        def rate(medians: Mapping[str, float]) -> dict[str, float]:
            return {"gradients per second": n / medians["writers"]}

        def gain(medians: Mapping[str, float]) -> dict[str, float]:
            faster = medians[everybody] / medians[most]
            return {f"times faster than {everybody}": faster}

        run, run_all, run_most = (
            self._writers,
            functools.partial(self._late, n),
            functools.partial(self._late, n - 1),
        )
        kinds = [
            Kind("writers", run, check, raw="Accumulate", bus=0, figures=rate),
            Kind(everybody, run_all, check, bus=0),
            Kind(most, run_most, check, bus=0, figures=gain),
        ]
        return kinds if n > 1 else kinds[:1]

    # What is applied, and how a round ends.

    def _no_slot(self) -> None:
        self._next = self._grad
        self._group.comm.Barrier()

    def _slot(self) -> None:
        self._next = self._accumulator.slot()

    def _cold_slot(self) -> None:
        self._slot()
        self._group.comm.Barrier()

    def _warm_slot(self) -> None:
        self._cold_slot()
        self._drop()

    def _apply(self) -> None:
        if not self._accumulator.apply_grad(self._next, self._step):
            raise WrongAnswerError("a gradient of the current step was dropped")

    def _turn(self) -> None:
        """End a round: rank 0 takes the mean, the others wait for the next step."""
        self._step += 1
        if self._group.rank == 0:
            self._take(self._group.size)
        else:
            self._wait_for(self._step)

    def _take(self, required: int) -> None:
        # Into existing memory, as MPI's calls do: new pages cost as much as a sum.
        self._mean = self._accumulator.take_grad(required, out=self._mean)

    def _wait_for(self, step: int) -> int:
        def reached() -> int | None:
            now = self._accumulator.global_step
            return now if now >= step else None

        return Deadline(None, "round").wait(reached, lambda: f"step {step}")

    def _round(self) -> None:
        self._slot()
        self._apply()
        self._turn()

    def _raw_round(self) -> None:
        comm = self._group.comm
        self._raw.accumulate(0, self._grad)
        comm.Barrier()
        if self._group.rank == 0:
            total = self._hosted(0)
            np.divide(total, np.float32(comm.size), out=self._mean)
            total[:] = 0
        comm.Barrier()

    def _hosted(self, rank: int) -> Array:
        self._raw.sync()
        where = rank * self._nbytes
        return self._raw.view(where, self._grad.size, self._grad.dtype)

    def _put(self) -> None:
        self._raw.put(self._group.rank * self._nbytes, self._grad)

    def _part(self, rank: int) -> Array:
        assert self._shared is not None
        return self._shared.view((rank, 0), self._grad.size, self._grad.dtype)

    def _copy_shared(self) -> None:
        np.copyto(self._part(self._group.rank), self._grad)

    def _read_shared(self) -> None:
        comm = self._group.comm
        comm.Barrier()
        if comm.rank == 0:
            np.copyto(self._mean, self._part(0))
            for rank in range(1, comm.size):
                self._mean += self._part(rank)
            self._mean /= comm.size
        comm.Barrier()

    def _drop(self) -> None:
        self._dropped = not self._accumulator.apply_grad(self._grad, _STALE)

    # Many gradients at once. Each run ends with an empty accumulator, and all ranks at
    # its step.

    def _empty(self) -> None:
        comm = self._group.comm
        comm.Barrier()
        if comm.rank == 0 and self._accumulator.num_accumulated():
            self._take(1)
        comm.Barrier()
        self._step = self._accumulator.global_step
        comm.Barrier()

    def _writers(self, rounds: int) -> list[float]:
        accumulator, group = self._accumulator, self._group
        begun = time.perf_counter()
        for _ in range(rounds):
            accumulator.apply_grad(self._grad, NEVER_STALE)
            if group.rank == 0 and accumulator.num_accumulated() >= group.size:
                self._take(group.size)
        self._empty()
        return [(time.perf_counter() - begun) / rounds]

    def _late(self, quorum: int, rounds: int) -> list[float]:
        accumulator, rank = self._accumulator, self._group.rank
        last, step = self._step + rounds, self._step
        computes = _COMPUTES * (_LATE if rank == self._group.size - 1 else 1)
        begun = time.perf_counter()
        while step < last:
            time.sleep(computes)
            accumulator.apply_grad(self._grad, step)
            if rank == 0:
                self._take(quorum)
            step = self._wait_for(step + 1)
        seconds = time.perf_counter() - begun
        self._empty()
        # The time of rank 0, which does not wait for the late rank's last gradient.
        return [seconds / rounds] if rank == 0 else []

    # Expected results.

    def _check_mean(self) -> None:
        if self._group.rank == 0:
            check_equal(self._mean, self._pattern + np.float32(self._spread))

    def _check_some(self) -> None:
        """Check the mean of some of the gradients, which differ by a constant."""
        if self._group.rank == 0:
            rest = self._mean - self._pattern
            if not 0 <= rest.min() <= rest.max() <= 2 * self._spread:
                raise WrongAnswerError(f"a mean is off by {rest.min()} to {rest.max()}")

    def _check_put(self) -> None:
        for rank in range(self._group.size) if self._group.rank == 0 else ():
            check_equal(self._hosted(rank), self._pattern + np.float32(rank))

    def _check_dropped(self) -> None:
        if not self._dropped:
            raise WrongAnswerError("a stale gradient was accepted")

    def forget(self) -> None:
        """Overwrite the results, and fill the slots with this rank's gradient."""
        self._mean[:] = np.nan
        self._dropped = False
        self._exchange.forget()
        for _ in range(2):
            np.copyto(self._accumulator.slot(), self._grad)
            self._round()
        self._mean = np.full_like(self._grad, np.nan)
        if self._group.rank == 0:
            for rank in range(self._group.size):
                self._hosted(rank)[:] = 0
            self._raw.sync()
        self._group.comm.Barrier()

    def free(self) -> None:
        """Free the windows. Collective."""
        self._accumulator.free()
        self._raw.free()
        self._exchange.free()
        if self._shared:
            self._shared.free()
