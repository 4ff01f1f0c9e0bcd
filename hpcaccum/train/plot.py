"""The plot: accuracy and loss over time, staleness, and samples of each rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hpcaccum.plots import COLORS, make_figure
from hpcaccum.train.options import STRATEGIES
from hpcaccum.train.report import LAG_NAMES, Result

_COLORS = dict(zip(STRATEGIES, COLORS, strict=False))
# If run times differ by more than this factor, the time axis is logarithmic.
_FAR_APART = 5


def draw(results: Sequence[Result], title: str, path: Path) -> None:
    """Plot one or several results."""
    figure, axes = make_figure(4, title)
    for axis, draw_panel in zip(axes, (_accuracy, _loss, _lags, _ranks), strict=True):
        draw_panel(axis, results)
    figure.savefig(path)


def _over_time(axis: Any, results: Sequence[Result]) -> None:
    ends = [result.seconds for result in results]
    if max(ends) > _FAR_APART * min(ends):
        axis.set_xscale("log")
        axis.set_xlabel("seconds, logarithmic")
    else:
        axis.set_xlim(left=0)
        axis.set_xlabel("seconds")
    axis.grid(alpha=0.25)


# With a marker at the end, as one point has no line.
_STYLE: dict[str, Any] = {"marker": "o", "markevery": [-1]}


def _accuracy(axis: Any, results: Sequence[Result]) -> None:
    for result in results:
        points = [(r.seconds, 100 * r.accuracy) for r in result.records[1:]]
        name = result.strategy
        axis.plot(*np.transpose(points), color=_COLORS[name], label=name, **_STYLE)
    axis.set_ylim(top=100)
    axis.set_title("test accuracy, %")
    _over_time(axis, results)
    axis.legend(frameon=False, loc="lower right")


def _loss(axis: Any, results: Sequence[Result]) -> None:
    for result in results:
        trained = [(r.seconds, r.loss) for r in result.records if r.loss is not None]
        tested = [(r.seconds, r.test_loss) for r in result.records[1:]]
        style = {"color": _COLORS[result.strategy], **_STYLE}
        test, training = ("test", "training") if result is results[0] else (None, None)
        axis.plot(*np.transpose(tested), label=test, **style)
        style |= {"alpha": 0.6, "linestyle": "--"}
        axis.plot(*np.transpose(trained), label=training, **style)
    axis.set_yscale("log")
    axis.set_title("loss, logarithmic")
    _over_time(axis, results)
    axis.legend(frameon=False, loc="lower left")


def _bars(results: Sequence[Result]) -> Iterator[tuple[Result, float, float]]:
    """Yield each result with the offset and the width of its bars."""
    width = 0.8 / len(results)
    for number, result in enumerate(results):
        yield result, (number - (len(results) - 1) / 2) * width, width


def _lags(axis: Any, results: Sequence[Result]) -> None:
    places = np.arange(len(LAG_NAMES))
    for result, offset, width in _bars(results):
        shares = [100 * share for share in result.lag_shares()]
        color = _COLORS[result.strategy]
        axis.bar(places + offset, shares, width, color=color, label=result.strategy)
    axis.set_xticks(places, LAG_NAMES)
    axis.set_ylim(0, 100)
    axis.set_title("staleness: gradients by lag, %")
    axis.set_xlabel("lag: updates since the gradient's parameters")
    axis.legend(frameon=False)


def _ranks(axis: Any, results: Sequence[Result]) -> None:
    ranks = np.arange(len(results[0].accepted))
    for result, offset, width in _bars(results):
        color = _COLORS[result.strategy]
        accepted = np.multiply(result.accepted, result.gradient_samples)
        dropped = np.multiply(result.dropped, result.gradient_samples)
        axis.bar(ranks + offset, accepted, width, color=color)
        axis.bar(
            ranks + offset,
            dropped,
            width,
            bottom=accepted,
            color="white",
            edgecolor=color,
            hatch="//////",
            linewidth=0.5,
        )
    # Empty bars, for the legend.
    axis.bar(0, 0, color="0.5", label="accepted")
    axis.bar(0, 0, color="white", edgecolor="0.5", hatch="//////", label="dropped")
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.set_title("samples in the gradients of each rank")
    axis.set_xlabel("rank")
    # Leave room for the legend above the bars.
    axis.set_ylim(0, max(1.15 * axis.get_ylim()[1], 1))
    axis.legend(frameon=False, loc="upper right", ncols=2)
