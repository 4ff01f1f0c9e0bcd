"""The parameter server, compared with MPI_Put and MPI_Get."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from hpcaccum import DropStaleGradientOptimizer
from hpcaccum.bench.measure import (
    ANY_STALENESS,
    Case,
    Memory,
    WrongAnswerError,
    apart,
    check_equal,
    repeated,
    update_each,
)
from hpcaccum.bench.step import RATE, Optimizing
from hpcaccum.deadline import Deadline
from hpcaccum.mpi import Region
from hpcaccum.server import BoundedStalenessInbox, Parameters, ParameterServer

if TYPE_CHECKING:
    from collections.abc import Callable


class Server(Case):
    """Parameters on rank 0, and their updates.

    - ``pull new``: all ranks read parameters that rank 0 has just published: 2 n times
      the bytes.
    - ``Get``: the same bytes by MPI_Get and a flush, after rank 0 has written them.
    - ``pull old``: a pull when nothing is new.
    - ``publish``: rank 0 writes new parameters: 2 times the bytes.
    - ``cycle``: what a worker of the drop-stale optimizer does for an update, all ranks
      at once: push a gradient from its slot, SGD on rank 0, publish, pull. Each update
      reads 2 and writes 1, publish and pull read and write: 7 n times the bytes.
    - ``Put Get``: a gradient to rank 0 by MPI_Put, parameters back by MPI_Get.
    - ``exchange``: between N nodes, each sends the bytes to the next one. Parameters
      must cross each link once; a cycle sends (n / N + 1) (N - 1) / N times the bytes.
    - ``copy``: a plain copy by all ranks at once.
    """

    help = "the parameter server: pulls, publishing, whole updates"
    memory = Memory(shared=3, shared_first=6, shared_all=1, private=9)

    def _prepare(self) -> None:
        n, group, count = self.n, self.group, self.count
        source, into = np.ones(count, np.float32), self._result()
        raw = self._hold(Region(group, 0, self.nbytes * n))
        self._parameters = self._hold(
            Parameters(group, 0, count, np.float32, "pull new")
        )
        self._source, self._into, self._step = source, into, 0
        self._on_root(self._publish)
        idle = self._hold(
            ParameterServer(
                group, 0, {"w": into}, self._queue, dedicated=False, what="pull old"
            )
        )
        self._cycle = Optimizing(
            count,
            lambda rule: DropStaleGradientOptimizer(rule, ANY_STALENESS, comm=group),
        )
        self._hold(self._cycle.optimizer)

        def put_get() -> None:
            raw.put(self.rank * self.nbytes, source)
            raw.get(0, into)

        def check() -> None:
            check_equal(into, np.float32(1))

        read = self._floor(2 * n, 1)
        new = apart(lambda: self._on_root(self._publish), self._pull)
        get = apart(
            lambda: self._on_root(lambda: raw.put(0, source)), lambda: raw.get(0, into)
        )
        self._add("pull new", new, check, raw="Get", **read)
        self._add("Get", get, check, reference=True, **read)
        old = repeated(lambda: idle.pull({"w": into}, known=0))
        self._add("pull old", old, bus=0)
        self._add("publish", self._publish_alone, **self._floor(2, 0))
        floor = self._floor(7 * n, update_each(self.nodes, n))
        run = self._cycle.run
        self._add("cycle", run, self._check_cycle, raw="Put Get", **floor)
        self._add("Put Get", repeated(put_get), reference=True)
        self._add_plain(into, source)

    def _queue(self, size: int, dtype: Any, rows: Any) -> BoundedStalenessInbox:
        return BoundedStalenessInbox(self.group, 0, size, dtype)

    def _publish(self) -> None:
        self._parameters.publish(lambda flat: np.copyto(flat, self._source), self._step)
        self._step += 1

    def _publish_alone(self, inner: int) -> list[float]:
        return repeated(self._publish)(inner) if self.rank == 0 else []

    def _on_root(self, write: Callable[[], object]) -> None:
        # No rank still reads what is overwritten now.
        self.comm.Barrier()
        if self.rank == 0:
            write()
        self.comm.Barrier()

    def _pull(self) -> None:
        deadline = Deadline(None, "pull")
        newest = self._parameters.newest()
        self._parameters.wait(newest, deadline, lambda: "the newest parameters")
        self._parameters.read(lambda flat: np.copyto(self._into, flat), deadline)

    def _check_cycle(self) -> None:
        """Compare this rank's variables with those expected at its step."""
        optimizer, step = self._cycle.optimizer, int(self._cycle.step.value)
        if not 0 < step <= optimizer.global_step:
            raise WrongAnswerError(f"step {step} of {optimizer.global_step}")
        for variable in self._cycle.variables:
            check_equal(variable.value, np.float32(-RATE * step))
