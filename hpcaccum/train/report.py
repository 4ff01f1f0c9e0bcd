"""The results of a training, and what it prints of them."""

from __future__ import annotations

import bisect
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hpcaccum import machine
from hpcaccum.errors import counted
from hpcaccum.tables import table
from hpcaccum.train.options import PERIODIC, Options

# Lower bounds of the classes of lags that are shown. The optimizers count lags of 31
# and more together.
_LAGS = (0, 1, 2, 3, 4, 8, 16, 31)
LAG_NAMES = ("0", "1", "2", "3", "4-7", "8-15", "16-30", "31+")
# A line of progress comes when the time since the start has doubled: after this many
# seconds at first, and at least so often.
_FIRST_LINE, _LONGEST_PAUSE = 1.0, 600.0
# Number of ranks that have their own row.
_MAX_ROWS = 16


@dataclass(frozen=True)
class Record:
    """One evaluation of the model, after `step` updates.

    `loss` is the mean over this rank's batches since its last record, if there are any;
    `test_loss` and `accuracy` are those on the test samples. `noise_scale` is that of
    gradients, in samples, if there is a log.
    """

    strategy: str
    seconds: float
    step: int
    epoch: float
    loss: float | None
    test_loss: float
    accuracy: float
    noise_scale: float | None = None

    def facts(self) -> dict[str, Any]:
        """Return it for JSON, which has no NaN: the loss of a run that diverged."""
        return {
            name: value if isinstance(value, str) or math.isfinite(value or 0) else None
            for name, value in asdict(self).items()
        }


@dataclass(frozen=True)
class Result:
    """The result of one run; the same on all ranks.

    It was `resumed_at` an update, made all `updates` up to `target`, or was `stopped`
    with an exit status before that. The numbers of `accepted` and `dropped` gradients,
    by rank, and of gradients by lag include those of earlier jobs; the seconds that
    each rank has `waited` in the optimizer, those of its last gradients, and the rates,
    do not. `accuracy` is that of the final model. There are no records if the rank that
    reports is lost.
    """

    strategy: str
    seconds: float
    updates: int
    target: int
    stopped: int
    resumed_at: int
    gradient_samples: int
    accepted: tuple[int, ...]
    dropped: tuple[int, ...]
    lags: dict[int, int]
    waited: tuple[float, ...]
    gradient_seconds: tuple[tuple[float, ...], ...]
    updates_per_second: float
    samples_per_second: float
    accuracy: float
    records: tuple[Record, ...]

    @property
    def diverged(self) -> bool:
        """Whether the last loss, on test samples, is not a finite number."""
        return not all(math.isfinite(each.test_loss) for each in self.records[-1:])

    def facts(self) -> dict[str, Any]:
        """Return it for JSON; the records are there already."""
        return {name: value for name, value in vars(self).items() if name != "records"}

    def lag_shares(self) -> list[float]:
        """Return the fraction of all gradients in each class of `LAG_NAMES`."""
        counts = [0] * len(_LAGS)
        for lag, count in self.lags.items():
            counts[bisect.bisect_right(_LAGS, lag) - 1] += count
        return [count / (sum(counts) or 1) for count in counts]


def describe(facts: dict[str, Any], options: Options) -> str:
    """Return a few lines that describe the machines, the data and the options."""
    data, device = facts["data"], facts["device"]
    widths = "-".join(map(str, (data["features"], *options.hidden, data["classes"])))
    delays = ", ".join(f"rank {r} +{ms:g} ms" for r, ms in options.straggler.items())
    return (
        f"{machine.describe(facts)}{'; ' + device if device else ''}\n"
        f"{data['name']}: {data['train']} samples to train, {data['test']} to test; "
        f"network {widths}\n"
        f"each feature is scaled to mean 0 and deviation 1 of the training samples\n"
        f"{options.optimizer} {options.rate:g}, batches of {options.batch}, "
        f"{counted(options.epochs, 'epoch')}, seed {options.seed}"
        f"{delays and f'; delay of each gradient: {delays}'}"
    )


def saved(result: Result, options: Options) -> str:
    """Return where the model of a run is, where the run began, and where it stopped."""
    begun = f"resumed at {result.resumed_at}" if result.resumed_at else "from the start"
    place = f"checkpoints: {options.save}; " if options.save else ""
    how = " (--resume continues)" if options.save else ""
    end = f"; stopped before {result.target}{how}" if result.stopped else ""
    if result.resumed_at >= result.target:
        end = "; it was complete before: more --epochs continue it"
    return f"{place}update {result.updates}, {begun}{end}"


class Progress:
    """Lines of the progress of one run, ever more seldom; `say` prints one."""

    def __init__(self, say: Callable[[str], None], strategy: str, epochs: int) -> None:
        self._say, self._strategy, self._epochs = say, strategy, epochs
        self._next_line = 0.0
        # The epoch in which the run began, of which a resumed one has passed some.
        self._begin: float | None = None

    def show(self, record: Record) -> None:
        """Print a line for a record, if it is time for one."""
        if self._begin is None:
            self._begin = record.epoch
        if record.seconds < self._next_line and record.epoch < self._epochs:
            return
        left = ""
        if self._begin < record.epoch < self._epochs:
            speed = (record.epoch - self._begin) / record.seconds
            left = f", {_duration((self._epochs - record.epoch) / speed)} left"
        loss = "" if record.loss is None else f"loss {record.loss:.3f}, "
        # Gradients that were on their way may have made a few more updates.
        epoch = min(record.epoch, self._epochs)
        self._say(
            f"{time.strftime('%H:%M:%S')} {self._strategy}: epoch {epoch:.0f} of "
            f"{self._epochs}, {record.seconds:.1f} s{left}, {loss}test accuracy "
            f"{record.accuracy:.1%}"
        )
        pause = min(max(record.seconds, _FIRST_LINE), _LONGEST_PAUSE)
        self._next_line = record.seconds + pause


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 100 else f"{minutes / 60:.1f} h"


def tables(results: Sequence[Result], options: Options) -> Iterator[str]:
    """Yield the lines of the tables, and those between them."""
    yield ""
    titles = ["strategy", "test accuracy", "seconds", "updates/s", "samples/s"]
    rows = [
        (
            result.strategy,
            f"{result.accuracy:.1%}",
            f"{result.seconds:.2f}",
            _rate(result.updates_per_second),
            _rate(result.samples_per_second),
            str(sum(result.accepted)),
            str(sum(result.dropped)),
        )
        for result in results
    ]
    yield from table([*titles, "accepted", "dropped"], rows)
    yield "\ngradients accepted and dropped, and time waited in the optimizer"
    titles = ["strategy", "rank", "accepted", "dropped", "waited"]
    of_ranks = [row for each in results for row in _ranks(each, options.straggler)]
    yield from table(titles, of_ranks, left=(0, 1))
    yield "\nstaleness: gradients by lag, the number of updates since their parameters"
    shares = [
        (each.strategy, *(f"{x:.1%}" if x else "-" for x in each.lag_shares()))
        for each in results
    ]
    yield from table(("strategy", *LAG_NAMES), shares)
    periodic = " and ".join(name for name in PERIODIC if name in options.strategies)
    more = f"; with {periodic}, of {options.period} times as many"
    yield f"\none gradient: the mean of {options.batch} samples{periodic and more}"


def _rate(number: float) -> str:
    """Return a rate with at least two digits."""
    return f"{number:.2g}" if 0 < number < 10 else f"{number:.0f}"


def _ranks(result: Result, straggler: dict[int, float]) -> Iterator[Sequence[str]]:
    """Yield a row for each of the first ranks, and one for the sums of the others."""
    ranks = list(zip(result.accepted, result.dropped, result.waited, strict=True))
    delays = {rank: f" (+{ms:g} ms)" for rank, ms in straggler.items() if ms}
    first = enumerate(ranks[:_MAX_ROWS])
    rows = {f"{rank}{delays.get(rank, '')}": row for rank, row in first}
    if rest := ranks[_MAX_ROWS:]:
        sums = (sum(column) for column in zip(*rest, strict=True))
        rows[f"{_MAX_ROWS}-{len(ranks) - 1}, sum"] = tuple(sums)
    for number, (label, (accepted, dropped, waited)) in enumerate(rows.items()):
        title = "" if number else result.strategy
        yield title, label, str(accepted), str(dropped), f"{waited:.2f} s"
