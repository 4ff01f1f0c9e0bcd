"""The picture: samples a second over ranks, and the lags."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from hpcaccum.plots import (
    COLORS,
    add_legend,
    group_by,
    make_figure,
    save_figure,
    set_ticks,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from hpcaccum.plan.simulation import Prediction

_LAGS = "share of gradients with this lag or a larger one, {} ranks"


def draw(found: Sequence[Prediction], title: str, path: Path) -> None:
    """Draw a panel of speeds and one of lags, those of the most ranks."""
    figure, (speeds, lags) = make_figure(2, title)
    sizes = sorted({each.setting.ranks for each in found})
    for place, (name, some) in enumerate(group_by(found, _name).items()):
        color = COLORS[place % len(COLORS)]
        line = ("-", "--", ":")[place // len(COLORS) % 3]
        samples = [each.means["samples_per_second"] for each in some]
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
        set_ticks(speeds.xaxis, sizes, "{:g}".format)
    else:
        speeds.set_xticks([])
    lags.set(xlabel="lag in updates", title=_LAGS.format(sizes[-1]), ylim=(0, 1.05))
    add_legend(lags)
    save_figure(figure, path)


def _name(each: Prediction) -> str:
    """Return what a line is called: what does not grow with ranks."""
    setting, text = each.setting, each.setting.name
    if setting.quorum is not None:
        share = setting.quorum / setting.ranks
        text = text.replace(f"quorum {setting.quorum}", f"quorum {share:.0%}")
    return text.replace(f"staleness {2 * setting.ranks}", "staleness 2n")
