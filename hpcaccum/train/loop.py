"""One training run: every rank trains, one of them evaluates the model."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from hpcaccum import CrossShardOptimizer, LostRankError, Tally, Variable, span
from hpcaccum.device import cupy
from hpcaccum.train.data import batches
from hpcaccum.train.model import MLP, widths
from hpcaccum.train.records import Observer, Record, Result
from hpcaccum.train.saving import Saver, facts
from hpcaccum.train.stopping import Requests, Stop
from hpcaccum.train.strategies import MAKERS

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpcaccum import Group
    from hpcaccum.dtypes import Array
    from hpcaccum.train.data import Dataset
    from hpcaccum.train.options import Options

T = TypeVar("T")

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
        requests: Those to this process to stop.
        found: The checkpoint to continue from, see `saving.find`.
    """

    def __init__(
        self,
        strategy: str,
        options: Options,
        data: Dataset,
        group: Group,
        show: Callable[[Record], None],
        requests: Requests,
        found: Any = None,
    ) -> None:
        self._strategy, self._group = strategy, group
        self._options, self._data = options, data
        self._exchange = MAKERS[strategy](options, group)
        self._optimizer = self._exchange.optimizer
        self._collective = isinstance(self._optimizer, CrossShardOptimizer)
        sizes = widths(options, data)
        place = cupy().asarray if options.device == "cuda" else np.asarray
        self._model = MLP(sizes, options.seed, self._exchange.variable, place=place)
        # The least number of updates that use so many samples.
        self._target = -(-options.epochs * len(data.y) // self._exchange.samples)
        self._delay = options.straggler.get(group.rank, 0) / 1000
        self._serves = group.rank in options.only_serve and not self._collective
        self._check_at = 0.0
        self._observer: Observer | None = None
        number, first = self._shard_group(options)
        self._saver = Saver(
            options, group.rank, facts(options, sizes), data, self._optimizer.snapshot
        )
        keepers = options.keepers(strategy)
        self._found, self._keeper = found, keepers[number]
        # The updates, and the gradients in them, of earlier jobs.
        self._start, self._earlier = 0, 0
        self._step = 0
        says = group.rank == options.reporter
        self._stop = Stop(group, requests, len(keepers), number, says)
        if group.rank == first:
            self._observer = Observer(
                strategy,
                number,
                self._evaluate,
                self._target,
                options.epochs,
                show,
            )

    def _evaluate(self) -> tuple[float, float]:
        with span("evaluate"):
            return self._model.evaluate(self._data.x_test, self._data.y_test)

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
        self._start_or_resume()
        self._batches = batches(
            self._data,
            self._options.batch,
            self._group.rank,
            self._group.size,
            self._options.seed,
            self._batches_used(),
        )
        if self._observer:
            self._observer.evaluate(self._start, 0.0)
        self._group.allgather(None, "start of training")
        self._begun = time.monotonic()
        if self._serves:
            self._optimizer.serve(self._after_update)
        else:
            self._work()
        return self._finish(time.monotonic() - self._begun)

    def _after_update(self, step: int) -> None:
        """Do what a rank that only serves does between two updates."""
        self._saver.passed(step)
        # Lets the others know.
        self._stop.asked()

    def _start_or_resume(self) -> None:
        """Continue from the checkpoint of this rank's model, if there is one."""
        found, variables = self._found or {}, self._model.variables
        step = self._group.allgather(found.get("step"), "--resume")[self._keeper]
        if step is None:
            self._optimizer.initialize(variables)
            return
        try:
            self._optimizer.restore(found.get("optimizer"), variables)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            # All ranks raise it.
            raise SystemExit(f"--resume {self._options.save}: {error}") from None
        self._saver.begin(step)
        self._start = step
        if not self._collective:
            self._earlier = sum(self._optimizer.statistics().accepted)

    def _batches_used(self) -> int:
        """Return about how many batches this rank used in earlier jobs.

        Exactly if it contributes to each update. If not, the counts include gradients
        that were pushed and not applied.
        """
        if self._exchange.exact or not self._start:
            return self._start
        tally, ranks = self._optimizer.statistics(), self._group.size
        gradients: int = sum(tally.accepted) + sum(tally.dropped)
        return (
            gradients * self._exchange.gradient_samples // (ranks * self._options.batch)
        )

    def _work(self) -> None:
        step = self._start
        global_step = Variable(np.array(step), "global_step")
        while step < self._target and not self._is_over(step):
            self._optimizer.minimize(self._loss, global_step)
            # Between two pushes of AGN the variables are local values that belong to no
            # step; the step changes when they are the center's.
            if step != global_step.value:
                step = int(global_step.value)
                if self._observer and step < self._target:
                    self._observer.passed(step, time.monotonic() - self._begun)
                self._saver.passed(step)
        self._step = step

    def _is_over(self, step: int) -> bool:
        if self._exchange.exact:
            # All stop after one step: the next would lack a gradient, or never end.
            return self._stop.is_after(step) or self._done_by_others()
        return self._done_by_others()

    def _done_by_others(self) -> bool:
        # A rank learns the step when it communicates, which for a slow one with AGN may
        # be many seconds away. Reading it at each call would slow down fast ranks.
        now = time.monotonic()
        if self._collective or now < self._check_at:
            return False
        self._check_at = now + _CHECK_PAUSE
        if not self._exchange.exact and self._stop.asked():
            return True
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
        """Free the optimizer, write what is kept, return the result. Collective."""
        if not self._collective:
            self._optimizer.leave()
        mine = seconds, self._optimizer.waited
        times, waits = zip(
            *self._every(mine, "end of training", (0.0, 0.0)), strict=True
        )
        # This sets all ranks' variables to those of the last update.
        self._optimizer.free()
        updates = self._step if self._collective else self._optimizer.global_step
        self._saver.finish(updates)
        if self._observer:
            self._observer.evaluate(updates, max(times))
        return self._result(max(times), waits, updates)

    def _every(self, value: T, what: str, lost: T) -> list[T]:
        """Return the values of all ranks, ``lost`` for those that are. Collective."""
        group = self._group
        with contextlib.suppress(LostRankError):
            return group.allgather(value, what)
        found = group.meet(value, what)
        return [found.get(rank, lost) for rank in range(group.size)]

    def _result(self, seconds: float, waits: tuple[float, ...], updates: int) -> Result:
        # The records of all models, in the order of their groups.
        mine = self._observer.records if self._observer else []
        records = [r for each in self._every(mine, "records", []) for r in each]
        records.sort(key=lambda record: record.group)
        # Models of shard groups may have stopped at different updates.
        end = updates, self._start
        made, starts = zip(*self._every(end, "updates", end), strict=True)
        if self._collective:
            tally = Tally(made, (0,) * len(made), {0: sum(made)})
            self._earlier = sum(starts)
        else:
            tally = self._optimizer.statistics()
        # A job of more ranks may have gone before; its other ranks did not wait here.
        waits += (0.0,) * (len(tally.accepted) - len(waits))
        stopped = self._stop.status if min(made) < self._target else 0
        if not self._group.lost:
            self._stop.free()
        finals = {record.group: record for record in records}.values()
        return Result(
            strategy=self._strategy,
            seconds=seconds,
            updates=min(made),
            target=self._target,
            stopped=stopped,
            resumed_at=min(starts),
            earlier=self._earlier,
            gradient_samples=self._exchange.gradient_samples,
            accepted=tally.accepted,
            dropped=tally.dropped,
            lags=tally.lags,
            waited=waits,
            accuracy=tuple(record.accuracy for record in finals),
            records=tuple(records),
        )
