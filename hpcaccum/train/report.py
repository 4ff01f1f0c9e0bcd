"""What a training prints: progress of the runs, and tables at the end."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from hpcaccum.errors import counted
from hpcaccum.tables import table
from hpcaccum.train.records import LAG_NAMES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from hpcaccum.train.options import Options
    from hpcaccum.train.records import Record, Result

# A line of progress comes when the time since the start has doubled: after this many
# seconds at first, and at least so often.
_FIRST_LINE, _LONGEST_PAUSE = 1.0, 600.0
# Number of ranks that have their own row.
_MAX_ROWS = 16
# Number of shard groups up to which each accuracy is shown.
_MAX_GROUPS = 4


def describe(facts: dict[str, Any], options: Options) -> str:
    """Return a few lines that describe the machines, the data and the options."""
    data, hosts = facts["data"], facts["hosts"]
    where = next(iter(hosts)) if len(hosts) == 1 else f"{len(hosts)} hosts"
    widths = "-".join(map(str, (data["features"], *options.hidden, data["classes"])))
    delays = ", ".join(f"rank {r} +{ms:g} ms" for r, ms in options.straggler.items())
    return (
        f"{counted(facts['ranks'], 'rank')} on {where}, {facts['mpi']} "
        f"{facts['mpi_version']}"
        f"{', ' + facts['device'] if facts['device'] else ''}"
        f"{'; delay of each gradient: ' + delays if delays else ''}\n"
        f"{data['name']}: {data['train']} samples to train, {data['test']} to test; "
        f"network {widths}\n"
        f"each feature is scaled to mean 0 and deviation 1 of the training samples\n"
        f"{options.optimizer} {options.rate:g}, batches of {options.batch}, "
        f"{counted(options.epochs, 'epoch')}, seed {options.seed}"
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
    """Lines of the progress of one run, ever more seldom.

    Args:
        say: Prints a line.
        strategy: Its name.
        epochs: How many the run has.
    """

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
    yield from _summary(results)
    yield "\ngradients accepted and dropped, and time waited in the optimizer"
    yield from _per_rank(results, options.straggler)
    yield "\nstaleness: gradients by lag, the number of updates since their parameters"
    yield from _staleness(results)
    yield f"\none gradient: the mean of {_gradient(options)}"


def _gradient(options: Options) -> str:
    samples = f"{options.batch} samples"
    if options.strategies == ("agn",):
        return f"{options.period} batches of {samples}"
    agn = f"; of {options.period} batches of {samples} with agn"
    return samples + (agn if "agn" in options.strategies else "")


def _summary(results: Sequence[Result]) -> list[str]:
    titles = "strategy", "test accuracy", "seconds", "updates/s", "samples/s"
    rows = [
        (
            result.strategy,
            _accuracy(result.accuracy),
            f"{result.seconds:.2f}",
            _rate(result.updates_per_second),
            _rate(result.samples_per_second),
            str(sum(result.accepted)),
            str(sum(result.dropped)),
        )
        for result in results
    ]
    return table((*titles, "accepted", "dropped"), rows)


def _rate(number: float) -> str:
    """Return a rate with at least two digits."""
    return f"{number:.2g}" if 0 < number < 10 else f"{number:.0f}"


def _accuracy(groups: Sequence[float]) -> str:
    if len(groups) > _MAX_GROUPS:
        return f"{min(groups):.1%} to {max(groups):.1%}"
    return " ".join(f"{accuracy:.1%}" for accuracy in groups)


def _per_rank(results: Sequence[Result], straggler: dict[int, float]) -> list[str]:
    rows: list[Sequence[str]] = []
    for result in results:
        title = result.strategy
        ranks = list(zip(result.accepted, result.dropped, result.waited, strict=True))
        for rank, each in enumerate(ranks[:_MAX_ROWS]):
            delay = f" (+{straggler[rank]:g} ms)" if straggler.get(rank) else ""
            rows.append((title, f"{rank}{delay}", *_cells(each)))
            title = ""
        if rest := ranks[_MAX_ROWS:]:
            label = f"{_MAX_ROWS}-{len(ranks) - 1}, sum"
            sums = [sum(column) for column in zip(*rest, strict=True)]
            rows.append((title, label, *_cells(sums)))
    titles = "strategy", "rank", "accepted", "dropped", "waited"
    return table(titles, rows, left=(0, 1))


def _cells(row: Sequence[float]) -> tuple[str, str, str]:
    return f"{row[0]:.0f}", f"{row[1]:.0f}", f"{row[2]:.2f} s"


def _staleness(results: Sequence[Result]) -> list[str]:
    def shares(result: Result) -> list[str]:
        return [f"{share:.1%}" if share else "-" for share in result.lag_shares()]

    rows = [(result.strategy, *shares(result)) for result in results]
    return table(("strategy", *LAG_NAMES), rows)
