"""Metrics of the optimizers of a running program, for a logger of the user's."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from hpcaccum.accumulator import Tally
from hpcaccum.arguments import seconds
from hpcaccum.errors import InvalidArgumentError
from hpcaccum.files import JsonLines

if TYPE_CHECKING:
    from typing_extensions import Self


class Metrics(NamedTuple):
    """What an optimizer has done so far.

    `waited` are the seconds that this rank has waited for others.
    """

    optimizer: str
    step: int
    waited: float
    tally: Tally


class Source(Protocol):
    """What has metrics."""

    def _metrics(self) -> Metrics: ...


_logs: list[MetricsLog] = []


def note(source: Source) -> None:
    """Tell the logs that this rank has made an update, or sent a gradient for one."""
    for log in list(_logs):
        log.look(source)


class MetricsLog:
    """What `log_to` returns; at the end of a ``with`` block, it is closed."""

    def __init__(
        self,
        write: Callable[[dict[str, Any]], object],
        every: float,
        close: Callable[[], object],
    ) -> None:
        self._write, self._every, self._end = write, every, close
        # By source: when its metrics were read last, and these.
        self._last: dict[Source, tuple[float, Metrics]] = {}

    def look(self, source: Source) -> None:
        """Write the metrics of an optimizer if it is time."""
        now = time.monotonic()
        if source not in self._last:
            self._last[source] = now, source._metrics()
        elif now >= self._last[source][0] + self._every:
            self._report(source, now)

    def _report(self, source: Source, now: float) -> None:
        then, before = self._last[source]
        metrics = source._metrics()
        tally, earlier = metrics.tally, before.tally.lags
        self._last[source] = now, metrics
        # Not 0, as a clock may stand still.
        passed = max(now - then, 1e-9)
        lags = {lag: n - earlier.get(lag, 0) for lag, n in tally.lags.items()}
        self._write(
            {
                "time": time.time(),
                "optimizer": metrics.optimizer,
                "step": metrics.step,
                "updates_per_second": (metrics.step - before.step) / passed,
                "waiting": min((metrics.waited - before.waited) / passed, 1.0),
                "accepted": list(tally.accepted),
                "dropped": list(tally.dropped),
                "lags": {lag: n for lag, n in sorted(lags.items()) if n},
            }
        )

    def close(self) -> None:
        """Write the last metrics of each optimizer, and no more."""
        if self in _logs:
            _logs.remove(self)
            for source in list(self._last):
                self._report(source, time.monotonic())
            self._end()

    def __enter__(self) -> Self:
        """Return this log."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close it."""
        self.close()


def log_to(
    target: Callable[[dict[str, Any]], object] | str | os.PathLike[str],
    every: float | str = "10s",
) -> MetricsLog:
    """Report what the optimizers of this rank do while they train. Not collective.

    On the host rank it costs no messages, so one usually calls it there::

        with hpc.log_to("metrics.jsonl") if rank == 0 else contextlib.nullcontext():
            ...  # train

    Args:
        target: A function that is called with each report, or a file, which is
            overwritten and gets each report as a line of JSON. The function is called
            at the end of a call of the optimizer, in the thread of that call; what it
            raises ends that call.
        every: Least time between two reports on an optimizer: seconds, or a text such
            as 10s, 5m or 1h.

    Returns:
        The log. Its ``close()``, or the end of a ``with`` block, writes a last report
        on each optimizer; until then it keeps them.

    A report is a dict with:

    - ``time``: seconds since the epoch;
    - ``optimizer``: the name of the optimizer, or of JAX's average;
    - ``step``: updates so far;
    - ``updates_per_second``, since the last report or the first update;
    - ``waiting``: the share of this time that this rank has waited for others;
    - ``accepted``, ``dropped``: the gradients of each rank so far;
    - ``lags``: the number of gradients of all ranks since the last report, by lag.

    Raises:
        InvalidArgumentError: If ``target`` is no function, and no file that can be
            written, or ``every`` is no time.
    """
    period = seconds(every, "every")
    if callable(target):
        log = MetricsLog(target, period, lambda: None)
    else:
        try:
            lines = JsonLines("log_to", Path(target))
        except TypeError:
            raise InvalidArgumentError(
                f"target must be a function or a file, got {target!r}"
            ) from None
        log = MetricsLog(lines.write, period, lines.close)
    _logs.append(log)
    return log
