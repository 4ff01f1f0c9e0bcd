"""Predictions as a table, and in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpcaccum.errors import counted
from hpcaccum.tables import table

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hpcaccum.plan.compute import Compute
    from hpcaccum.plan.setting import Setting
    from hpcaccum.plan.simulation import Prediction

# From here on, a server or a link is called busy; a rank is called slow if it waits so
# much less than the others.
_BUSY, _SLOW = 0.8, 0.2
# More gains than this in samples a second are worth another strategy.
_GAIN = 0.05
_KIB, _UNITS = 1024, ("B", "KiB", "MiB", "GiB", "TiB")
LEGEND = """\
updates/s and samples/s of gradients that count, +- what repeats differ by (95 %)
dropped: share of gradients that do not count; lag: of all that arrive, in updates
waiting: share of a rank's time, mean and most; busy: the server, the busiest link"""


def label(setting: Setting) -> str:
    """Return the options of a setting in words."""
    words = list[str]()
    if setting.has_server and setting.quorum is not None:
        words.append(f"quorum {setting.quorum}")
    if setting.strategy in ("agn", "local-steps"):
        words.append(f"period {setting.period}")
    if setting.fragments > 1:
        words.append(f"{setting.fragments} fragments")
    if setting.strategy == "drop-stale" or (
        setting.strategy == "local-steps" and setting.staleness < float("inf")
    ):
        words.append(f"staleness {setting.staleness:g}")
    if setting.servers > 1:
        words.append(f"{setting.servers} servers")
    return ", ".join(words)


def bytes_text(nbytes: float) -> str:
    """Return bytes in a suitable unit."""
    power = 0
    while nbytes >= _KIB and power < len(_UNITS) - 1:
        nbytes, power = nbytes / _KIB, power + 1
    return f"{nbytes:.3g} {_UNITS[power]}"


def lines(predictions: Sequence[Prediction]) -> list[str]:
    """Return the lines of the table."""
    titles = (
        *("ranks", "strategy", "setting", "updates/s", "+-", "samples/s", "dropped"),
        *("lag", "p90", "max", "waiting", "most", "server", "link", "memory"),
    )
    return table(titles, [tuple(_cells(each)) for each in predictions], (1, 2))


def _cells(found: Prediction) -> Iterator[str]:
    setting, means = found.setting, found.means
    yield str(setting.ranks)
    yield setting.strategy
    yield label(setting)
    speed, samples = means["updates_per_second"], means["samples_per_second"]
    yield f"{speed:.4g}"
    interval = found.intervals["updates_per_second"]
    yield f"{(interval[1] - interval[0]) / 2:.1g}" if interval else "-"
    yield f"{samples:.4g}"
    yield f"{means['dropped']:.1%}"
    yield f"{means['mean_lag']:.2f}"
    yield str(found.percentile(90))
    yield str(len(found.lags) - 1)
    waiting = found.waiting
    yield f"{sum(waiting) / len(waiting):.0%}"
    yield f"{max(waiting):.0%}"
    yield f"{means['server_utilisation']:.0%}"
    yield f"{means['busiest_link']:.0%}"
    yield bytes_text(setting.memory_bytes)


def words(predictions: Sequence[Prediction], compute: Compute) -> Iterator[str]:
    """Yield what follows from the predictions, for each number of ranks."""
    for ranks in dict.fromkeys(each.setting.ranks for each in predictions):
        yield _recommended([p for p in predictions if p.setting.ranks == ranks])
    last = predictions[-1].setting
    if compute.failures:
        hours = 1 / (compute.failures * last.nodes * 3600)
        yield (
            f"{counted(last.nodes, 'node')}: a failure every {hours:.3g} h, and "
            f"{compute.availability(last.nodes):.1%} of the time is left for training"
        )
    for each in predictions:
        yield from _remarks(each)


def _recommended(found: Sequence[Prediction]) -> str:
    """Return which setting is the best, and why."""
    base = found[0]
    best = max(found, key=lambda each: each.means["samples_per_second"])
    # Of settings that are as good, the first: it is the more exact one.
    enough = best.means["samples_per_second"] / (1 + _GAIN)
    best = next(each for each in found if each.means["samples_per_second"] >= enough)
    name = f"{best.setting.strategy} {label(best.setting)}".strip()
    dropped = best.means["dropped"]
    text = (
        f"{counted(best.setting.ranks, 'rank')}: {name}: "
        f"{best.means['updates_per_second']:.3g} updates/s, "
        f"{best.means['samples_per_second']:.4g} samples/s"
    )
    if best is not base:
        more = best.means["samples_per_second"] / base.means["samples_per_second"] - 1
        name = f"{base.setting.strategy} {label(base.setting)}".strip()
        text += f" ({more:+.0%} to {name})"
    if dropped:
        text += f", {dropped:.1%} of the gradients dropped"
    if lag := best.means["mean_lag"]:
        text += f", {lag:.1f} updates late in the mean"
    return text


def _remarks(found: Prediction) -> Iterator[str]:
    """Yield what is notable about a prediction."""
    setting, waiting, means = found.setting, found.waiting, found.means
    name = f"{setting.strategy} {label(setting)}".strip()
    name = f"{counted(setting.ranks, 'rank')}, {name}"
    if means["busiest_link"] > _BUSY:
        more = min(2 * setting.servers, setting.nodes)
        cure = f"; try --servers {more}" if setting.has_server else ""
        yield f"{name}: the busiest link is the bottleneck{cure}"
    if means["server_utilisation"] > _BUSY:
        yield f"{name}: the server is the bottleneck; try a longer --period"
    slow = [r for r, each in enumerate(waiting) if each < max(waiting) - _SLOW]
    if 0 < len(slow) <= setting.ranks // 2:
        who = ", ".join(map(str, slow[:8])) + (", ..." if len(slow) > 8 else "")
        what = "rank" if len(slow) == 1 else "ranks"
        yield f"{name}: the others wait for {what} {who}"
    for doubt in found.doubts:
        yield f"{name}: {doubt}"
