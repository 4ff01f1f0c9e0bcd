"""The parameter server, compared with MPI_Put and MPI_Get."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from hpcaccum import DropStaleGradientOptimizer
from hpcaccum.bench.measure import (
    Kind,
    Memory,
    WrongAnswerError,
    apart,
    check_equal,
    repeated,
    to_or_from_one,
    update_each,
)
from hpcaccum.bench.references import ANY_STALENESS, RingExchange, plain_copy
from hpcaccum.bench.step import RATE, Optimizing
from hpcaccum.deadline import Deadline
from hpcaccum.mpi import Region
from hpcaccum.server import BoundedStalenessInbox, Parameters, ParameterServer

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpcaccum import Group, Optimizer
    from hpcaccum.bench.measure import Conditions
    from hpcaccum.dtypes import Array


class Server:
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

    Args:
        group: The ranks.
        nbytes: Of the parameters.
    """

    least_ranks: ClassVar[int] = 1
    memory: ClassVar[Memory] = Memory(shared=3, shared_first=6, shared_all=1, private=9)

    def __init__(self, group: Group, nbytes: int, _: Conditions) -> None:
        self._group, self._nbytes = group, nbytes
        self._count = count = nbytes // 4
        self._source, self._into = np.ones(count, np.float32), np.zeros(count, "f4")
        self._raw = Region(group, 0, nbytes * group.size)
        self._parameters = Parameters(group, 0, count, np.float32, "pull new")
        self._step = 0
        self._publish_first()
        self._idle = ParameterServer(
            group, 0, {"w": self._into}, self._queue, dedicated=False, what="pull old"
        )
        self._cycle = Optimizing(count, lambda rule: _drop_stale(rule, group))
        self._exchange = RingExchange(group, nbytes)
        self.kinds = [*self._reads(), *self._updates()]

    def _queue(self, size: int, dtype: Any, rows: Any) -> BoundedStalenessInbox:
        return BoundedStalenessInbox(self._group, 0, size, dtype)

    def _reads(self) -> list[Kind]:
        n, nodes, nbytes = self._group.size, len(self._group.nodes), self._nbytes
        floor = nbytes if nodes == 1 else 0
        read: Any = {
            "moves": 2 * n * floor,
            "crosses": to_or_from_one(nodes) * nbytes,
        }
        new = apart(self._publish_first, self._pull, self._nothing)
        get = apart(self._write_first, self._get, self._nothing)
        old = repeated(lambda: self._idle.pull({"w": self._into}, known=0))
        return [
            Kind("pull new", new, self._check_pulled, raw="Get", **read),
            Kind("Get", get, self._check_pulled, reference=True, **read),
            Kind("pull old", old, bus=0),
            Kind("publish", self._publish_timed, moves=2 * floor),
        ]

    def _updates(self) -> list[Kind]:
        n, nodes = self._group.size, len(self._group.nodes)
        floor: Any = {"crosses": update_each(nodes, n) * self._nbytes}
        if nodes == 1:
            floor = {"moves": 7 * n * self._nbytes}
        run, raw = self._cycle.run, repeated(self._put_get)
        return [
            Kind("cycle", run, self._check_cycle, raw="Put Get", **floor),
            Kind("Put Get", raw, reference=True),
            *self._exchange.kinds,
            plain_copy(self._into, self._source, n),
        ]

    def _nothing(self) -> None:
        pass

    # Parameters on rank 0.

    def _fill(self, flat: Array) -> None:
        np.copyto(flat, self._source)

    def _publish_first(self) -> None:
        self._on_root(self._publish)

    def _publish(self) -> None:
        self._parameters.publish(self._fill, self._step)
        self._step += 1

    def _write_first(self) -> None:
        self._on_root(lambda: self._raw.put(0, self._source))

    def _on_root(self, write: Callable[[], object]) -> None:
        comm = self._group.comm
        # No rank still reads what is overwritten now.
        comm.Barrier()
        if comm.rank == 0:
            write()
        comm.Barrier()

    def _publish_timed(self, inner: int) -> list[float]:
        if self._group.rank != 0:
            return []
        return repeated(self._publish)(inner)

    def _pull(self) -> None:
        deadline = Deadline(None, "pull")
        newest = self._parameters.newest()
        self._parameters.wait(newest, deadline, lambda: "the newest parameters")
        self._parameters.read(lambda flat: np.copyto(self._into, flat), deadline)

    def _get(self) -> None:
        self._raw.get(0, self._into)

    def _put_get(self) -> None:
        self._raw.put(self._group.rank * self._nbytes, self._source)
        self._raw.get(0, self._into)

    # Expected results.

    def _check_pulled(self) -> None:
        check_equal(self._into, np.float32(1))

    def _check_cycle(self) -> None:
        """Compare this rank's variables with those expected at its step."""
        optimizer, step = self._cycle.optimizer, int(self._cycle.step.value)
        if not 0 < step <= optimizer.global_step:
            raise WrongAnswerError(f"step {step} of {optimizer.global_step}")
        for variable in self._cycle.variables:
            check_equal(variable.value, np.float32(-RATE * step))

    def forget(self) -> None:
        """Overwrite the result of a pull."""
        self._into[:] = np.nan
        self._exchange.forget()

    def free(self) -> None:
        """Free the windows, and stop the server. Collective."""
        self._cycle.optimizer.free()
        self._idle.free()
        self._parameters.free()
        self._raw.free()
        self._exchange.free()


def _drop_stale(rule: Optimizer, group: Group) -> DropStaleGradientOptimizer:
    return DropStaleGradientOptimizer(rule, ANY_STALENESS, comm=group)
