"""One training run: every rank trains, one of them evaluates the model."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

import hpcaccum as hpc
from hpcaccum.device import cupy
from hpcaccum.dtypes import Array
from hpcaccum.train.data import Dataset, batches
from hpcaccum.train.model import MLP, noise_scale
from hpcaccum.train.options import PERIODIC, Options
from hpcaccum.train.report import Record, Result
from hpcaccum.train.saving import Saver

T = TypeVar("T")

RULES: dict[str, Callable[[float], hpc.Optimizer]] = {
    "sgd": hpc.SGD,
    "momentum": lambda rate: hpc.Momentum(rate, 0.9),
    "adagrad": hpc.Adagrad,
    "adam": hpc.Adam,
}

# The last gradients of each rank, whose times are kept; batches from whose gradients
# the noise scale is estimated.
_TIMES, _NOISE_BATCHES = 200, 32
# Seconds between two checks of a rank whether the work is done.
_CHECK_PAUSE = 0.05
# Least time between two evaluations, in multiples of the time of one: evaluation
# then takes at most a twentieth of the run, whatever the data.
_PAUSE = 20


def _make(strategy: str, options: Options, group: hpc.Group) -> Any:
    rule = RULES[options.optimizer](options.rate)
    if strategy == "cross-shard":
        return hpc.CrossShardOptimizer(rule, comm=group)
    server = {"dedicated": options.dedicated, "servers": options.servers, "comm": group}
    if strategy == "sync-replicas":
        return hpc.SyncReplicasOptimizer(rule, options.quorum, **server)
    if strategy == "drop-stale":
        return hpc.DropStaleGradientOptimizer(rule, options.staleness, **server)
    if strategy == "local-steps":
        # The outer rule of DiLoCo.
        outer = hpc.Momentum(0.7, 0.9, use_nesterov=True)
        server["quorum"] = options.quorum
        return hpc.LocalStepsOptimizer(rule, outer, options.period, **server)
    return hpc.AGNOptimizer(rule, communication_period=options.period, **server)


class Run:
    """This rank's part of the training with one strategy. Collective.

    The work is a number of updates: as many as use the training set ``epochs`` times.
    An update counts the gradients that it needs: one; with cross-shard one of each
    rank; with sync-replicas and local-steps the quorum, even if it contains more.
    Dropped gradients do not count. That of a push is of the batches of a period.

    With cross-shard all ranks make every step together. With the others each rank
    trains until the global step reaches that number, so faster ranks do more work.

    ``show`` is called with each evaluation of the model, on the rank that reports.
    ``earlier`` is the number of updates of the runs before this one.
    """

    def __init__(
        self,
        strategy: str,
        options: Options,
        data: Dataset,
        group: hpc.Group,
        show: Callable[[Record], None],
        stop: hpc.Stopping,
        saver: Saver,
        earlier: int = 0,
    ) -> None:
        self._strategy, self._group, self._show = strategy, group, show
        self._options, self._data = options, data
        self._optimizer = _make(strategy, options, group)
        self._collective = strategy == "cross-shard"
        sizes = data.x.shape[1], *options.hidden, data.classes
        to_device = cupy().asarray if options.device == "cuda" else np.asarray
        self._model = MLP(sizes, options.seed, to_device=to_device)
        count = {"cross-shard": group.size, "sync-replicas": options.quorum}
        is_periodic = strategy in PERIODIC
        # Gradients in an update, and whether each rank that trains has one in each.
        gradients = {**count, "local-steps": options.quorum}.get(strategy, 1)
        self._exact = strategy in count and gradients >= options.workers
        batches_in_one = options.period if is_periodic else 1
        self._gradient_samples = batches_in_one * options.batch
        # The least number of updates that use so many samples.
        samples = gradients * self._gradient_samples
        self._target = -(-options.epochs * len(data.y) // samples)
        self._delay = options.straggler.get(group.rank, 0) / 1000
        self._serves = group.rank in options.only_serve and not self._collective
        self._reports = group.rank == options.reporter
        self._saver = saver
        saver.start(self._optimizer.snapshot)
        self._stop, self._steps_before = stop, earlier
        # The updates, and the gradients in them, of earlier jobs.
        self._start, self._earlier = 0, 0
        self._step, self._check_at = 0, 0.0
        self._losses: list[float] = []
        self._times: deque[float] = deque(maxlen=_TIMES)
        self._records: list[Record] = []
        self._next_epoch, self._quiet_until = 1.0, 0.0

    def __call__(self) -> Result:
        """Train. Collective."""
        self._start_or_resume()
        options, group = self._options, self._group
        begin = self._batches_used()
        self._batches = batches(
            self._data, options.batch, group.rank, group.size, options.seed, begin
        )
        self._evaluate(self._start, 0.0)
        group.allgather(None, "start of training")
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
        self._stops(step)

    def _stops(self, step: int) -> bool:
        return self._stop.agreed(self._steps_before + step)

    def _start_or_resume(self) -> None:
        """Continue from the checkpoint that the host has found, if there is one."""
        found, variables = self._saver.found or {}, self._model.variables
        steps = self._group.allgather(found.get("step"), "--resume")
        step = steps[self._options.host]
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
        self._earlier = step * self._group.size
        if not self._collective:
            self._earlier = sum(self._optimizer.statistics().accepted)

    def _batches_used(self) -> int:
        """Return about how many batches this rank used in earlier jobs."""
        if self._exact or not self._start:
            return self._start
        # Not exactly: the counts include gradients that were pushed and not applied.
        tally = self._optimizer.statistics()
        gradients: int = sum(tally.accepted) + sum(tally.dropped)
        samples = gradients * self._gradient_samples
        return int(samples // (self._group.size * self._options.batch))

    def _work(self) -> None:
        step = self._start
        global_step = hpc.Variable(np.array(step), "global_step")
        while step < self._target and not self._is_over(step):
            self._optimizer.minimize(self._loss, global_step)
            # Between two pushes the variables of AGN and local-steps belong to no
            # step; the step changes when they are the center's.
            if step != global_step.value:
                step = int(global_step.value)
                self._passed(step, time.monotonic() - self._begun)
                self._saver.passed(step)
        self._step = step

    def _passed(self, step: int, seconds: float) -> None:
        """Evaluate the model after an epoch, or less often if that is slow."""
        is_next = self._options.epochs * step / self._target >= self._next_epoch
        if is_next and step < self._target and seconds >= self._quiet_until:
            # CPU time: other ranks may use the core meanwhile.
            begun = time.thread_time()
            self._evaluate(step, seconds)
            self._quiet_until = seconds + _PAUSE * (time.thread_time() - begun)

    def _evaluate(self, step: int, seconds: float) -> None:
        if not self._reports:
            return
        epoch = self._options.epochs * step / self._target
        self._next_epoch = int(epoch) + 1.0
        loss = float(np.mean(self._losses)) if self._losses else None
        self._losses.clear()
        with hpc.span("evaluate"):
            found = self._model.evaluate(self._data.x_test, self._data.y_test)
            noise = self._noise_scale() if self._options.log else None
        record = Record(self._strategy, seconds, step, epoch, loss, *found, noise)
        self._records.append(record)
        self._show(record)

    def _noise_scale(self) -> float | None:
        options, data = self._options, self._data
        rng = np.random.default_rng(options.seed)
        samples = [
            rng.integers(0, len(data.y), options.batch) for _ in range(_NOISE_BATCHES)
        ]
        grads = (
            self._model.loss_and_gradients(data.x[each], data.y[each])[1]
            for each in samples
        )
        return noise_scale(grads, options.batch)

    def _is_over(self, step: int) -> bool:
        # All stop after one step: the next would lack a gradient, or never end.
        return (self._exact and self._stops(step)) or self._done_by_others()

    def _done_by_others(self) -> bool:
        # A rank learns the step when it communicates, which for a slow one with AGN may
        # be many seconds away. Reading it at each call would slow down fast ranks.
        now = time.monotonic()
        if self._collective or now < self._check_at:
            return False
        self._check_at = now + _CHECK_PAUSE
        step = self._optimizer.global_step
        return step >= self._target or (not self._exact and self._stops(step))

    def _loss(self) -> tuple[float, list[Array]]:
        # Gradients computed in the memory of the exchange are not copied.
        begun, memory = time.monotonic(), self._optimizer.gradient_arrays()
        loss, gradients = self._model.loss_and_gradients(*next(self._batches), memory)
        if self._delay:
            time.sleep(self._delay)
        self._times.append(round(time.monotonic() - begun, 6))
        if self._reports:
            self._losses.append(loss)
        return loss, gradients

    def _finish(self, seconds: float) -> Result:
        """Free the optimizer, write what is kept, return the result. Collective."""
        if not self._collective:
            self._optimizer.leave()
        mine = seconds, self._optimizer.waited, tuple(self._times)
        ends = self._every(mine, "end of training", (0.0, 0.0, ()))
        times, waits, gradients = zip(*ends, strict=True)
        # This sets all ranks' variables to those of the last update.
        self._optimizer.free()
        updates = self._step if self._collective else self._optimizer.global_step
        self._saver.finish(updates)
        self._evaluate(updates, max(times))
        found = self._every(tuple(self._records), "records", ())
        size = self._group.size
        tally = hpc.Tally((updates,) * size, (0,) * size, {0: updates * size})
        if not self._collective:
            tally = self._optimizer.statistics()
        # A job of more ranks may have gone before; its other ranks did not wait here.
        waits += (0.0,) * (len(tally.accepted) - len(waits))
        stopped = self._stop.status if updates < self._target else 0
        seconds, records = max(times), found[self._options.reporter]
        samples = (sum(tally.accepted) - self._earlier) * self._gradient_samples
        return Result(
            strategy=self._strategy,
            seconds=seconds,
            updates=updates,
            target=self._target,
            stopped=stopped,
            resumed_at=self._start,
            gradient_samples=self._gradient_samples,
            accepted=tally.accepted,
            dropped=tally.dropped,
            lags=tally.lags,
            waited=waits,
            gradient_seconds=gradients,
            updates_per_second=(updates - self._start) / seconds,
            samples_per_second=samples / seconds,
            accuracy=records[-1].accuracy if records else 0.0,
            records=records,
        )

    def _every(self, value: T, what: str, lost: T) -> list[T]:
        """Return the values of all ranks, ``lost`` for those that are. Collective."""
        found = self._group.gather_present(value, what)
        return [found.get(rank, lost) for rank in range(self._group.size)]
