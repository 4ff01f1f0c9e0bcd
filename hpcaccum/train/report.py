"""Output on the terminal: progress of the runs, and tables at the end."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from hpcaccum.errors import counted
from hpcaccum.mpi import number_in
from hpcaccum.train import terminal
from hpcaccum.train.records import LAG_NAMES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hpcaccum.train.options import Options
    from hpcaccum.train.records import Record, Result

# Without a terminal, which has a bar, a line of progress comes when the time since the
# start has doubled: after this many seconds at first, and at least so often.
_FIRST_LINE, _LONGEST_PAUSE = 1.0, 600.0
# Columns without a terminal, unless COLUMNS is set.
_WIDTH = 100
# Lines of a terminal, of which the bar needs one.
_HEIGHT = 25
# Number of ranks that have their own row.
_MAX_ROWS = 16
# Number of shard groups up to which each accuracy is shown.
_MAX_GROUPS = 4


class _Console(Console):
    """Leaves a pipe that nothing reads to the command, as `print` does."""

    def on_broken_pipe(self) -> None:
        """Raise the error that is being handled, instead of SystemExit."""
        raise


def console(reports: bool) -> Console:
    """Return this rank's console, quiet unless the rank reports."""
    width = terminal.columns()
    return _Console(
        quiet=not reports,
        # FORCE_COLOR and TTY_COMPATIBLE override the detection.
        force_terminal=True if width else None if _forced() else False,
        # Rich would read the variables COLUMNS and LINES, and fail for some texts.
        width=number_in(os.environ, "COLUMNS") or width or _WIDTH,
        height=_HEIGHT,
        highlight=False,
        markup=False,
        emoji=False,
    )


def _forced() -> bool:
    return bool(os.environ.get("FORCE_COLOR") or os.environ.get("TTY_COMPATIBLE"))


def describe(facts: dict[str, Any], options: Options) -> str:
    """Return a few lines that describe the machines, the data and the options."""
    data, hosts = facts["data"], facts["hosts"]
    where = next(iter(hosts)) if len(hosts) == 1 else f"{len(hosts)} hosts"
    widths = "-".join(map(str, (data["features"], *options.hidden, data["classes"])))
    delays = ", ".join(f"rank {r} +{ms:g} ms" for r, ms in options.straggler.items())
    return (
        f"{counted(facts['ranks'], 'rank')} on {where}, {facts['mpi']}"
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


def balanced_text(accuracy: float | None) -> str:
    """Return what follows an accuracy if the classes are uneven."""
    return "" if accuracy is None else f", balanced {accuracy:.1%}"


class Bar:
    """Progress of one run: a bar on a terminal, otherwise lines, ever more seldom."""

    def __init__(self, out: Console, strategy: str, epochs: int) -> None:
        self._out, self._strategy, self._epochs = out, strategy, epochs
        self._next_line = 0.0
        # The epoch in which the run began, of which a resumed one has passed some.
        self._begin: float | None = None
        text = TextColumn("{task.fields[text]}")
        name = TextColumn(f"{strategy:13}")
        # No drawing thread: it would disturb the measurement.
        self._bar = Progress(name, BarColumn(), text, console=out, auto_refresh=False)
        self._task = self._bar.add_task(strategy, total=epochs, text="")
        if out.is_terminal:
            self._bar.start()

    def show(self, record: Record) -> None:
        """Show one record."""
        if self._begin is None:
            self._begin = record.epoch
        loss = "" if record.loss is None else f"loss {record.loss:.3f}, "
        # Gradients that were on their way may have made a few more updates.
        epoch = min(record.epoch, self._epochs)
        text = (
            f"epoch {epoch:.0f} of {self._epochs}, {record.seconds:.1f} s"
            f"{self._left(record)}, {loss}test accuracy {record.accuracy:.1%}"
            f"{balanced_text(record.balanced_accuracy)}"
        )
        if self._out.is_terminal:
            self._bar.update(self._task, completed=record.epoch, text=text)
            self._bar.refresh()
        elif record.seconds >= self._next_line or record.epoch >= self._epochs:
            clock = time.strftime("%H:%M:%S")
            self._out.print(f"{clock} {self._strategy}: {text}", soft_wrap=True)
            pause = min(max(record.seconds, _FIRST_LINE), _LONGEST_PAUSE)
            self._next_line = record.seconds + pause

    def _left(self, record: Record) -> str:
        """Return how long the rest will take at the speed so far."""
        assert self._begin is not None
        done = record.epoch - self._begin
        if done <= 0 or record.epoch >= self._epochs:
            return ""
        seconds = record.seconds / done * (self._epochs - record.epoch)
        if seconds < 100:
            return f", {seconds:.0f} s left"
        minutes = round(seconds / 60)
        hours = f"{minutes // 60} h {minutes % 60:02} min"
        return f", {hours if minutes >= 100 else f'{minutes} min'} left"

    def stop(self) -> None:
        """Stop drawing the bar; it stays visible."""
        # If the bar was not started, stop would print an empty line.
        if self._out.is_terminal:
            self._bar.stop()


def tables(results: Sequence[Result], options: Options) -> Iterator[Table | str]:
    """Yield the tables and the lines between them."""
    yield ""
    yield _summary(results)
    yield "\ngradients accepted and dropped, and time waited in the optimizer"
    yield _per_rank(results, options.straggler)
    yield "\nstaleness: gradients by lag, the number of updates since their parameters"
    yield _staleness(results)
    yield f"\none gradient: the mean of {_gradient(options)}"


def print_all(parts: Iterator[Table | str], out: Console) -> None:
    """Print tables and lines; on a narrow terminal, too, all numbers are whole."""
    for part in parts:
        if isinstance(part, Table):
            for column in part.columns:
                words = *str(column.header).split(), *map(str, column.cells)
                column.min_width = max(map(len, words))
        out.print(part, crop=False)


def _gradient(options: Options) -> str:
    samples = f"{options.batch} samples"
    if options.strategies == ("agn",):
        return f"{options.period} batches of {samples}"
    agn = f"; of {options.period} batches of {samples} with agn"
    return samples + (agn if "agn" in options.strategies else "")


def _table(*names: str, texts: int = 1) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0)
    )
    for number, name in enumerate(names):
        right = number >= texts
        table.add_column(name, justify="right" if right else "left", no_wrap=not right)
    return table


def _summary(results: Sequence[Result]) -> Table:
    names = "seconds", "updates/s", "samples/s", "accepted", "dropped"
    uneven = any(result.balanced_accuracy for result in results)
    balanced = ["balanced accuracy"] if uneven else []
    table = _table("strategy", "test accuracy", *balanced, *names)
    for result in results:
        table.add_row(
            result.strategy,
            _accuracy(result.accuracy),
            *([_accuracy(result.balanced_accuracy or ())] if uneven else []),
            f"{result.seconds:.2f}",
            _rate(result.updates_per_second),
            _rate(result.samples_per_second),
            str(sum(result.accepted)),
            str(sum(result.dropped)),
        )
    return table


def _rate(number: float) -> str:
    """Return a rate with at least two digits."""
    return f"{number:.2g}" if 0 < number < 10 else f"{number:.0f}"


def _accuracy(groups: Sequence[float]) -> str:
    if len(groups) > _MAX_GROUPS:
        return f"{min(groups):.1%} to {max(groups):.1%}"
    return " ".join(f"{accuracy:.1%}" for accuracy in groups)


def _per_rank(results: Sequence[Result], straggler: dict[int, float]) -> Table:
    table = _table("strategy", "rank", "accepted", "dropped", "waited", texts=2)
    for result in results:
        title = result.strategy
        rows = list(zip(result.accepted, result.dropped, result.waited, strict=True))
        for rank, row in enumerate(rows[:_MAX_ROWS]):
            delay = f" (+{straggler[rank]:g} ms)" if straggler.get(rank) else ""
            table.add_row(title, f"{rank}{delay}", *_cells(row))
            title = ""
        if rest := rows[_MAX_ROWS:]:
            label = f"{_MAX_ROWS}-{len(rows) - 1}, sum"
            sums = [sum(column) for column in zip(*rest, strict=True)]
            table.add_row(title, label, *_cells(sums))
    return table


def _cells(row: Sequence[float]) -> tuple[str, str, str]:
    return f"{row[0]:.0f}", f"{row[1]:.0f}", f"{row[2]:.2f} s"


def _staleness(results: Sequence[Result]) -> Table:
    table = _table("strategy", *LAG_NAMES)
    for result in results:
        shares = (f"{share:.1%}" if share else "-" for share in result.lag_shares())
        table.add_row(result.strategy, *shares)
    return table
