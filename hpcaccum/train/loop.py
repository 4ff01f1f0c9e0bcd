"""One training run: every rank trains, one of them evaluates the model."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcaccum import CrossShardOptimizer, Tally, Variable
from hpcaccum.device import cupy
from hpcaccum.train.data import batches
from hpcaccum.train.model import MLP
from hpcaccum.train.records import Observer, Record, Result
from hpcaccum.train.strategies import MAKERS

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpcaccum import Group
    from hpcaccum.train.data import Dataset
    from hpcaccum.train.options import Options

Array = np.ndarray[Any, Any]

# Seconds between two checks of a rank whether the work is done.
_CHECK_PAUSE = 0.05


class Run:
    """This rank's part of the training with one strategy. Collective.

    The work is a number of updates: as many as use the training set ``epochs`` times.
    An update counts the gradients that it needs: one; with cross-shard one of each
    rank; with sync-replicas the quorum, even if it contains more. Dropped gradients do
    not count.

    With cross-shard all ranks make every step together. With the others each rank
    trains until the global step reaches that number, so faster ranks do more work.

    Args:
        strategy: A key of `strategies.MAKERS`.
        options, data, group: The same on all ranks.
        show: Called with each record of this rank.
    """

    def __init__(
        self,
        strategy: str,
        options: Options,
        data: Dataset,
        group: Group,
        show: Callable[[Record], None],
    ) -> None:
        self._strategy, self._group = strategy, group
        self._exchange = MAKERS[strategy](options, group)
        self._optimizer = self._exchange.optimizer
        self._collective = isinstance(self._optimizer, CrossShardOptimizer)
        sizes = (data.x.shape[1], *options.hidden, data.classes)
        place = cupy().asarray if options.device == "cuda" else np.asarray
        self._model = MLP(sizes, options.seed, self._exchange.variable, place=place)
        self._target = self._exchange.updates(options.epochs * len(data.y))
        self._delay = options.straggler.get(group.rank, 0) / 1000
        self._serves = options.dedicated and group.rank == 0 and not self._collective
        self._batches = batches(
            data, options.batch, group.rank, group.size, options.seed
        )
        self._check_at = 0.0
        self._observer: Observer | None = None
        number, first = self._shard_group(options)
        if group.rank == first:
            self._observer = Observer(
                strategy,
                number,
                lambda: self._model.evaluate(data.x_test, data.y_test),
                self._target,
                options.epochs,
                show,
            )

    def _shard_group(self, options: Options) -> tuple[int, int]:
        """Return this rank's group number and the rank that evaluates its model."""
        if not self._collective or not options.groups:
            return 0, options.reporter
        groups, rank = options.groups, self._group.rank
        number = next(n for n, ranks in enumerate(groups) if rank in ranks)
        mine = groups[number]
        return number, options.reporter if options.reporter in mine else min(mine)

    def __call__(self) -> Result:
        """Train. Collective."""
        self._optimizer.initialize(self._model.variables)
        if self._observer:
            self._observer.evaluate(0, 0.0)
        self._group.allgather(None, "start of training")
        self._begun = time.monotonic()
        if self._serves:
            self._optimizer.serve()
        else:
            self._work()
        return self._finish(time.monotonic() - self._begun)

    def _work(self) -> None:
        global_step, step = Variable(np.zeros((), np.int64), "global_step"), 0
        while step < self._target and not self._done_by_others():
            self._optimizer.minimize(self._loss, global_step)
            # Between two pushes of AGN the variables are local values that belong to no
            # step; the step changes when they are the center's.
            if step != global_step.value:
                step = int(global_step.value)
                if self._observer and step < self._target:
                    self._observer.passed(step, time.monotonic() - self._begun)

    def _done_by_others(self) -> bool:
        # A rank learns the step when it communicates, which for a slow one with AGN may
        # be many seconds away. Reading it at each call would slow down fast ranks.
        now = time.monotonic()
        if self._collective or now < self._check_at:
            return False
        self._check_at = now + _CHECK_PAUSE
        return bool(self._optimizer.global_step >= self._target)

    def _loss(self) -> tuple[float, list[Array]]:
        # Gradients computed in the memory of the exchange are not copied.
        memory = self._optimizer.gradient_arrays()
        loss, gradients = self._model.loss_and_gradients(*next(self._batches), memory)
        if self._delay:
            time.sleep(self._delay)
        if self._observer:
            self._observer.add(loss)
        return loss, gradients

    def _finish(self, seconds: float) -> Result:
        if not self._collective:
            self._optimizer.leave()
        times = self._group.allgather(
            (seconds, self._optimizer.waited), "end of training"
        )
        seconds = max(each for each, _ in times)
        # This sets all ranks' variables to those of the last update.
        self._optimizer.free()
        updates = self._target if self._collective else self._optimizer.global_step
        tally = self._tally(updates)
        if self._observer:
            self._observer.evaluate(updates, seconds)
        mine = self._observer.records if self._observer else []
        records = [r for each in self._group.allgather(mine, "records") for r in each]
        records.sort(key=lambda record: record.group)
        finals = {record.group: record.accuracy for record in records}
        return Result(
            strategy=self._strategy,
            seconds=seconds,
            updates=updates,
            gradient_samples=self._exchange.gradient_samples,
            accepted=tally.accepted,
            dropped=tally.dropped,
            lags=tally.lags,
            waited=tuple(waited for _, waited in times),
            accuracy=tuple(finals.values()),
            records=tuple(records),
        )

    def _tally(self, updates: int) -> Tally:
        if not self._collective:
            return self._optimizer.statistics()  # type: ignore[no-any-return]
        ranks = self._group.size
        return Tally((updates,) * ranks, (0,) * ranks, {0: updates * ranks})
