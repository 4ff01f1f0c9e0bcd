"""What people see: how it goes, and tables at the end."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from hpcaccum.train import terminal
from hpcaccum.train.records import LAG_NAMES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hpcaccum.train.options import Options
    from hpcaccum.train.records import Record, Result

# Seconds between two lines where there is no terminal to draw a bar on.
_LINE_PAUSE = 1.0
# Columns where there is no terminal, unless COLUMNS says otherwise.
_WIDTH = 100
# Ranks that have a row of their own.
_MAX_ROWS = 16
# Shard groups whose accuracy is told one by one.
_MAX_GROUPS = 4


def console(speaks: bool) -> Console:
    """Return where this rank writes to; nothing comes out unless it speaks."""
    width = terminal.columns()
    return Console(
        quiet=not speaks,
        # FORCE_COLOR and TTY_COMPATIBLE are for those who know better.
        force_terminal=True if width else None if _forced() else False,
        width=None if "COLUMNS" in os.environ else width or _WIDTH,
        highlight=False,
        markup=False,
        emoji=False,
    )


def _forced() -> bool:
    return bool(os.environ.get("FORCE_COLOR") or os.environ.get("TTY_COMPATIBLE"))


def describe(facts: dict[str, Any], options: Options) -> str:
    """Return what is done, and where, in a few lines.

    Args:
        facts: From `log.circumstances`.
        options: Of this job.
    """
    data, hosts = facts["data"], facts["hosts"]
    where = next(iter(hosts)) if len(hosts) == 1 else f"{len(hosts)} hosts"
    widths = "-".join(map(str, (data["features"], *options.hidden, data["classes"])))
    late = ", ".join(f"rank {r} +{ms:g} ms" for r, ms in options.straggler.items())
    return (
        f"{_count(facts['ranks'], 'rank')} on {where}, {facts['mpi']}"
        f"{', ' + facts['device'] if facts['device'] else ''}"
        f"{'; late with each gradient: ' + late if late else ''}\n"
        f"{data['name']}: {data['train']} samples to train, {data['test']} to test; "
        f"network {widths}\n"
        f"{options.optimizer} {options.rate:g}, batches of {options.batch}, "
        f"{_count(options.epochs, 'epoch')}, seed {options.seed}"
    )


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


class Bar:
    """How one run goes: a bar on a terminal, a line now and then elsewhere."""

    def __init__(self, out: Console, strategy: str, epochs: int) -> None:
        self._out, self._strategy, self._epochs = out, strategy, epochs
        self._next_line = 0.0
        text = TextColumn("{task.fields[text]}")
        name = TextColumn(f"{strategy:13}")
        # No thread that draws: it would disturb what is measured.
        self._bar = Progress(name, BarColumn(), text, console=out, auto_refresh=False)
        self._task = self._bar.add_task(strategy, total=epochs, text="")
        if out.is_terminal:
            self._bar.start()

    def show(self, record: Record) -> None:
        """Show one record."""
        loss = "" if record.loss is None else f"loss {record.loss:.3f}, "
        text = (
            f"epoch {record.epoch:.0f} of {self._epochs}, {record.seconds:.1f} s, "
            f"{loss}test accuracy {record.accuracy:.1%}"
        )
        if self._out.is_terminal:
            self._bar.update(self._task, completed=record.epoch, text=text)
            self._bar.refresh()
        elif time.monotonic() >= self._next_line or record.epoch >= self._epochs:
            self._out.print(f"{self._strategy}: {text}", soft_wrap=True)
            self._next_line = time.monotonic() + _LINE_PAUSE

    def stop(self) -> None:
        """Leave the bar as it is."""
        # Where it was not started, this would print an empty line.
        if self._out.is_terminal:
            self._bar.stop()


def tables(results: Sequence[Result], options: Options) -> Iterator[Table | str]:
    """Yield the tables, and the lines around them."""
    yield ""
    yield _summary(results)
    yield "\ngradients accepted and dropped, and waiting inside of the optimizer"
    yield _per_rank(results, options.straggler)
    yield "\nhow stale: gradients by the number of updates since their parameters"
    yield _staleness(results)
    yield f"\none gradient: the mean of {_gradient(options)}"


def _gradient(options: Options) -> str:
    samples = f"{options.batch} samples"
    if options.strategies == ("agn",):
        return f"{options.period} batches of {samples}"
    many = f"; of {options.period} such with agn"
    return samples + (many if "agn" in options.strategies else "")


def _table(*names: str, texts: int = 1) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0)
    )
    for number, name in enumerate(names):
        right = number >= texts
        table.add_column(name, justify="right" if right else "left", no_wrap=not right)
    return table


def _summary(results: Sequence[Result]) -> Table:
    names = "test accuracy", "seconds", "updates/s", "samples/s"
    table = _table("strategy", *names, "accepted", "dropped")
    for result in results:
        table.add_row(
            result.strategy,
            _accuracy(result.accuracy),
            f"{result.seconds:.2f}",
            f"{result.updates_per_second:.0f}",
            f"{result.samples_per_second:.0f}",
            str(sum(result.accepted)),
            str(sum(result.dropped)),
        )
    return table


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
            late = f" (+{straggler[rank]:g} ms)" if straggler.get(rank) else ""
            table.add_row(title, f"{rank}{late}", *_words(row))
            title = ""
        if rest := rows[_MAX_ROWS:]:
            label = f"{_MAX_ROWS}-{len(rows) - 1}, sum"
            sums = [sum(column) for column in zip(*rest, strict=True)]
            table.add_row(title, label, *_words(sums))
    return table


def _words(row: Sequence[float]) -> tuple[str, str, str]:
    return f"{row[0]:.0f}", f"{row[1]:.0f}", f"{row[2]:.2f} s"


def _staleness(results: Sequence[Result]) -> Table:
    table = _table("strategy", *LAG_NAMES)
    for result in results:
        shares = (f"{share:.1%}" if share else "-" for share in result.lag_shares())
        table.add_row(result.strategy, *shares)
    return table
