"""Predictions: repeated simulations, as a table, in words, and as a picture."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np

from hpcaccum import plots
from hpcaccum.errors import counted, format_ranks
from hpcaccum.plan.compute import Compute
from hpcaccum.plan.setting import Machine, Setting
from hpcaccum.plan.simulation import simulate
from hpcaccum.server import LARGE
from hpcaccum.tables import table

# How far the mean lag may be from Little's law.
_LITTLE = 0.02
# Quantiles of Student's distribution for intervals of 95 %, from 2 repeats on.
_STUDENT = (12.7, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)
# A server or a link that is busy for this share of the time is a bottleneck. A rank is
# slow if the share of its time that it waits is smaller than that of others by so much.
_BUSY, _SLOW = 0.8, 0.2
# Settings whose samples a second, or progress, differ by less are as good.
_GAIN = 0.05
_SPEED, _PROGRESS = "samples_per_second", "progress"
LEGEND = """\
updates/s, samples/s: of gradients that count; +-: 95 % interval over the repeats
dropped: gradients that do not count; lag: of all that arrive, in updates
waiting: share of a rank's time, mean and most; server, link: share of time in use, the
link of the busiest node; with a quorum, what it sends and receives in turns"""
MODEL = """\
progress: updates/s of very large batches that lower the loss as much, by a model and
not measured (McCandlish et al. 2018, arXiv:1812.06162); it does not know lags"""


@dataclass(frozen=True)
class Prediction:
    """What is predicted for one setting, by several simulations."""

    setting: Setting
    # The numbers of `Outcome.figures`, and the intervals in which they are with 95 %.
    means: dict[str, float]
    intervals: dict[str, tuple[float, float] | None]
    # The share of time in which each rank waits; how many gradients had each lag.
    waiting: list[float]
    lags: list[int]
    doubts: list[str]  # in words

    def percentile(self, percent: float) -> int:
        """Return the lag that so many percent of the gradients do not exceed."""
        lags = np.cumsum(self.lags)
        return int(np.searchsorted(lags, percent / 100 * lags[-1]))

    def facts(self) -> dict[str, Any]:
        """Return what ``--json`` writes."""
        staleness = self.setting.staleness
        return {
            **vars(self.setting),
            "staleness": None if math.isinf(staleness) else staleness,
            **self.means,
            "lag_p50": self.percentile(50),
            "lag_p90": self.percentile(90),
            "lag_max": len(self.lags) - 1,
            "lags": self.lags,
            "waiting_least": min(self.waiting),
            "waiting_most": max(self.waiting),
            "memory_bytes": self.setting.memory_bytes,
            "intervals": self.intervals,
            "doubts": self.doubts,
        }


def predict(
    setting: Setting,
    machine: Machine,
    compute: Compute,
    updates: int,
    seeds: range,
    noise: float | None = None,
) -> Prediction:
    """Predict what a setting does, by a simulation with each of the seeds.

    ``noise`` is the noise scale of gradients, in samples.
    """
    found = [simulate(setting, machine, compute, updates, seed) for seed in seeds]
    samples = setting.batch * setting.period / setting.fragments
    # During a restart no rank trains.
    trains = compute.availability(setting.nodes)
    figures = [each.figures(samples, trains) for each in found]
    columns = {name: [each[name] for each in figures] for name in figures[0]}
    means = {name: fmean(column) for name, column in columns.items()}
    intervals = {name: _interval(column) for name, column in columns.items()}
    if noise is not None:
        # McCandlish et al. (2018), section 2.2.
        speed, samples = means["updates_per_second"], means[_SPEED]
        means[_PROGRESS] = speed / (1 + noise * speed / samples)
    lags = sum((each.lags for each in found), Counter[int]())
    return Prediction(
        setting,
        means,
        intervals,
        np.mean([each.waiting for each in found], axis=0).tolist(),
        [lags[lag] for lag in range(max(lags) + 1)],
        list(_doubts(setting, machine, means)),
    )


def _interval(column: Sequence[float]) -> tuple[float, float] | None:
    if len(column) < 2:
        return None
    quantile = _STUDENT[min(len(column) - 1, len(_STUDENT)) - 1]
    middle, width = fmean(column), quantile * stdev(column) / math.sqrt(len(column))
    return middle - width, middle + width


def _doubts(
    setting: Setting, machine: Machine, means: dict[str, float]
) -> Iterator[str]:
    if 0 < machine.ranks < (here := -(-setting.ranks // setting.nodes)):
        yield f"extrapolated from {counted(machine.ranks, 'rank')} on a node to {here}"
    if 0 < machine.nbytes < setting.nbytes:
        sizes = [each / 2**20 for each in (machine.nbytes, setting.nbytes)]
        yield "extrapolated from gradients of {:.3g} MiB to {:.3g} MiB".format(*sizes)
    if machine.nodes == 1 < setting.nodes:
        yield "the costs between nodes are the usual ones"
    if setting.lost and setting.nodes > 1:
        whole = np.unique(setting.node_of).size < setting.nodes
        if not setting.has_server or (whole and setting.servers > 1):
            yield "such a loss ends the job; this is a new one without these ranks"
    # Updates a second times the mean time from a pull to the admission, less the share
    # of gradients that make an update themselves.
    lag, law = means["mean_lag"], means["law"]
    if abs(lag - law) > _LITTLE * max(lag, law, 1):
        why = "ranks push together, or more --updates are needed"
        yield f"mean lag {lag:.3g}, by Little's law {law:.3g}: {why}"


def lines(predictions: Sequence[Prediction]) -> list[str]:
    """Return the lines of the table."""
    rows = [_row(each) for each in predictions]
    return table(list(rows[0]), [list(row.values()) for row in rows], (1,))


def _row(found: Prediction) -> dict[str, str]:
    setting, means = found.setting, found.means
    interval = found.intervals["updates_per_second"]
    model = {}
    if _PROGRESS in means:
        model["progress"] = f"{means[_PROGRESS]:.3g}"
    return {
        "ranks": str(setting.ranks),
        "strategy": setting.name,
        "updates/s": f"{means['updates_per_second']:.4g}",
        "+-": f"{(interval[1] - interval[0]) / 2:.1g}" if interval else "-",
        "samples/s": f"{means[_SPEED]:.4g}",
        **model,
        "dropped": f"{means['dropped']:.1%}",
        "lag": f"{means['mean_lag']:.2f}",
        "p90": str(found.percentile(90)),
        "max": str(len(found.lags) - 1),
        "waiting": f"{means['waiting']:.0%}",
        "most": f"{max(found.waiting):.0%}",
        "server": f"{means['server_utilisation']:.0%}",
        "link": f"{means['busiest_link']:.0%}",
        "MiB/node": f"{setting.memory_bytes / 2**20:.4g}",
    }


def words(predictions: Sequence[Prediction], compute: Compute) -> Iterator[str]:
    """Yield what follows from the predictions."""
    for ranks in dict.fromkeys(each.setting.ranks for each in predictions):
        found = [each for each in predictions if each.setting.ranks == ranks]
        if lost := found[0].setting.lost:
            who = f"{counted(ranks, 'rank')}, {format_ranks(lost)} lost"
            yield f"{who}: {ranks - len(lost)} train on, and a quorum is at most that"
        for kind, waits in ("every update waits", True), ("no update waits", False):
            if some := [each for each in found if each.setting.synchronous == waits]:
                yield f"{counted(ranks, 'rank')}, {kind}: {_best(some, found[0])}"
    if compute.failures:
        nodes = predictions[-1].setting.nodes
        hours = 1 / (compute.failures * nodes * 3600)
        yield (
            f"{counted(nodes, 'node')}: a failure every {hours:.3g} h, "
            f"{compute.availability(nodes):.1%} of the time is left to train"
        )
    for each in predictions:
        who = f"{counted(each.setting.ranks, 'rank')}, {each.setting.name}"
        yield from (f"{who}: {remark}" for remark in _remarks(each))


def _best(found: Sequence[Prediction], base: Prediction) -> str:
    """Return which setting is the best, and how it compares."""
    what = _PROGRESS if _PROGRESS in base.means else _SPEED
    enough = max(each.means[what] for each in found) / (1 + _GAIN)
    # The first of those that are as good drops least.
    best = next(each for each in found if each.means[what] >= enough)
    means = best.means
    text = f"{best.setting.name}: {means['updates_per_second']:.3g} updates/s, "
    text += f"{means[_SPEED]:.4g} samples/s"
    if best is not base:
        gain = means[what] / base.means[what] - 1
        of = "progress " if what == _PROGRESS else ""
        text += f" ({of}{gain:+.0%} to {base.setting.name})"
    if means["dropped"]:
        text += f", {means['dropped']:.1%} dropped"
    if means["mean_lag"]:
        text += f", mean lag {means['mean_lag']:.2g}"
    return text


def _remarks(found: Prediction) -> Iterator[str]:
    """Yield what is notable about a prediction."""
    setting, waiting = found.setting, found.waiting
    # Sparse variables have one server.
    more = min(2 * setting.servers, setting.nodes) if setting.touched == 1 else 1
    cure = f": try --servers {more}" if more > setting.servers else ""
    if found.means["busiest_link"] > _BUSY:
        link, cure = ("server's", cure) if setting.has_server else ("busiest", "")
        yield f"the {link} link is the bottleneck{cure}"
    elif found.means["server_utilisation"] > _BUSY:
        # What an update of few parameters takes, each server takes.
        if setting.nbytes < LARGE or not cure:
            cure = ": try fewer ranks"
        yield f"the server is the bottleneck{cure}"
    slow = [rank for rank, each in enumerate(waiting) if each < max(waiting) - _SLOW]
    everybody = setting.quorum is None or setting.quorum >= len(waiting)
    if slow and everybody and setting.synchronous:
        yield f"all wait for {format_ranks(setting.present[slow].tolist())}"
    yield from found.doubts


def draw(found: Sequence[Prediction], title: str, path: Path) -> None:
    """Draw a panel of speeds and one of lags, those of the most ranks."""
    figure, (speeds, lags) = plots.make_figure(2, title)
    sizes = sorted({each.setting.ranks for each in found})
    for place, (name, some) in enumerate(plots.group_by(found, _name).items()):
        color = plots.COLORS[place % len(plots.COLORS)]
        line = ("-", "--", ":")[place // len(plots.COLORS) % 3]
        samples = [each.means[_SPEED] for each in some]
        if len(sizes) > 1:
            ranks = [each.setting.ranks for each in some]
            speeds.plot(ranks, samples, line, marker="o", markersize=4, color=color)
        else:
            speeds.bar(place, samples, color=color, width=0.7)
        counts = np.array(some[-1].lags)
        late = counts[::-1].cumsum()[::-1] / counts.sum()
        lags.plot(late, line, color=color, label=name, drawstyle="steps-mid")
    speeds.set(title="samples/s of gradients that count")
    if len(sizes) > 1:
        speeds.set(xlabel="ranks", xscale="log", yscale="log")
        plots.set_ticks(speeds.xaxis, sizes, "{:g}".format)
    else:
        speeds.set_xticks([])
    text = f"share of gradients with this lag or a larger one, {sizes[-1]} ranks"
    lags.set(xlabel="lag in updates", title=text, ylim=(0, 1.05))
    plots.add_legend(lags)
    figure.savefig(path)


def _name(each: Prediction) -> str:
    """Return what a line is called: what does not grow with ranks."""
    setting, text = each.setting, each.setting.name
    if setting.quorum is not None:
        share = setting.quorum / setting.ranks
        text = text.replace(f"quorum {setting.quorum}", f"quorum {share:.0%}")
    return text.replace(f"staleness {2 * setting.ranks}", "staleness 2n")
