"""How long other ranks wait while the host rank computes and does not enter MPI."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from hpcaccum import ConditionalAccumulator
from hpcaccum.bench.measure import Kind, Memory, WrongAnswerError, check_equal
from hpcaccum.bench.references import NEVER_STALE, gradient
from hpcaccum.mpi import Region

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpcaccum import Group
    from hpcaccum.bench.measure import Conditions
    from hpcaccum.dtypes import Array

# Longest time that rank 0 computes, and the pause between two gradients, in seconds.
_BUSY, _PAUSE = 1.0, 2e-3
_MATRIX = 256


class Progress:
    """Rank 0 multiplies matrices for a second, while the others send it gradients.

    - ``apply``: apply_grad of a gradient; the last rank takes it, so that the next one
      is the first of its round.
    - ``Put``: the same bytes by MPI_Put and a flush, without the thread that lets MPI
      progress.

    On one node the memory is shared, and no rank waits for rank 0.

    Args:
        group: The ranks, at least 2.
        nbytes: Of a gradient.
        conditions: How long to compute.
    """

    least_ranks: ClassVar[int] = 2
    memory: ClassVar[Memory] = Memory(shared=2, shared_all=3, private=5)

    def __init__(self, group: Group, nbytes: int, conditions: Conditions) -> None:
        count = nbytes // 4
        self._group, self._nbytes = group, nbytes
        self._grad = gradient(0, count)
        self._mean: Array = np.zeros_like(self._grad)
        self._busy = min(_BUSY, conditions.seconds / 2)
        self._matrix = np.ones((_MATRIX, _MATRIX), np.float32)
        self._raw = Region(group, 0, nbytes * group.size)
        self.kinds = [
            Kind("apply", self._apply, self._check_apply, raw="Put"),
            Kind("Put", self._put, self._check_put, reference=True),
        ]

    def _apply(self, _: int) -> list[float]:
        # Made for each run: its thread would speed up the raw call, too.
        with ConditionalAccumulator(
            "float32", self._grad.shape, comm=self._group
        ) as accumulator:

            def take() -> None:
                if self._group.rank == self._group.size - 1:
                    self._mean = accumulator.take_grad(1)

            seconds = self._while_busy(
                lambda: accumulator.apply_grad(self._grad, NEVER_STALE), take
            )
            # Gradients of the other ranks since the last take.
            if self._group.rank == 0 and accumulator.num_accumulated():
                accumulator.take_grad(1)
        return seconds

    def _put(self, _: int) -> list[float]:
        where = self._group.rank * self._nbytes
        return self._while_busy(lambda: self._raw.put(where, self._grad), lambda: None)

    def _while_busy(
        self, send: Callable[[], object], after: Callable[[], None]
    ) -> list[float]:
        """Compute on rank 0; on the others send repeatedly, and return the times."""
        self._group.comm.Barrier()
        until, seconds = time.perf_counter() + self._busy, []
        while time.perf_counter() < until:
            if self._group.rank == 0:
                self._matrix @ self._matrix
                continue
            begun = time.perf_counter()
            send()
            seconds.append(time.perf_counter() - begun)
            after()
            time.sleep(_PAUSE)
        self._group.comm.Barrier()
        return seconds

    def _check_apply(self) -> None:
        if self._group.rank == self._group.size - 1:
            check_equal(self._mean, self._grad)

    def _check_put(self) -> None:
        if self._group.rank == 0:
            self._raw.sync()
            for rank in range(1, self._group.size):
                where = rank * self._nbytes
                got = self._raw.view(where, self._grad.size, self._grad.dtype)
                check_equal(got, self._grad)
            if self._raw.view(0, 1, self._grad.dtype)[0]:
                raise WrongAnswerError("a Put reached the place of another rank")

    def forget(self) -> None:
        """Overwrite the results."""
        self._mean = np.full_like(self._grad, np.nan)

    def free(self) -> None:
        """Free the window. Collective."""
        self._raw.free()
