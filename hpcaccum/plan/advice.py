"""Predictions as a table, and in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpcaccum.errors import counted
from hpcaccum.tables import table

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hpcaccum.plan.compute import Compute
    from hpcaccum.plan.simulation import Prediction

# A server or a link that is busy for this share of the time is a bottleneck. A rank is
# slow if the share of its time that it waits is smaller than that of others by so much.
_BUSY, _SLOW = 0.8, 0.2
# Settings whose samples a second differ by less are as good.
_GAIN = 0.05
_MIB = 1 << 20
_SPEED = "samples_per_second"
LEGEND = """\
updates/s, samples/s: of gradients that count; +-: 95 % interval over the repeats
dropped: gradients that do not count; lag: of all that arrive, in updates
waiting: share of a rank's time, mean and most; server, link: share of time in use"""


def lines(predictions: Sequence[Prediction]) -> list[str]:
    """Return the lines of the table."""
    titles = (
        *("ranks", "strategy", "updates/s", "+-", "samples/s", "dropped", "lag"),
        *("p90", "max", "waiting", "most", "server", "link", "MiB/node"),
    )
    return table(titles, [tuple(_cells(each)) for each in predictions], (1,))


def _cells(found: Prediction) -> Iterator[str]:
    setting, means = found.setting, found.means
    interval = found.intervals["updates_per_second"]
    yield str(setting.ranks)
    yield setting.name
    yield f"{means['updates_per_second']:.4g}"
    yield f"{(interval[1] - interval[0]) / 2:.1g}" if interval else "-"
    yield f"{means[_SPEED]:.4g}"
    yield f"{means['dropped']:.1%}"
    yield f"{means['mean_lag']:.2f}"
    yield str(found.percentile(90))
    yield str(len(found.lags) - 1)
    for share in (
        *(means["waiting"], max(found.waiting)),
        *(means["server_utilisation"], means["busiest_link"]),
    ):
        yield f"{share:.0%}"
    yield f"{setting.memory_bytes / _MIB:.4g}"


def words(predictions: Sequence[Prediction], compute: Compute) -> Iterator[str]:
    """Yield what follows from the predictions."""
    for ranks in dict.fromkeys(each.setting.ranks for each in predictions):
        found = [each for each in predictions if each.setting.ranks == ranks]
        exact = [each for each in found if each.setting.synchronous]
        rest = [each for each in found if not each.setting.synchronous]
        for kind, some in ("every update waits", exact), ("no update waits", rest):
            if some:
                yield f"{counted(ranks, 'rank')}, {kind}: {_best(some, found[0])}"
    last = predictions[-1].setting
    if compute.failures:
        hours = 1 / (compute.failures * last.nodes * 3600)
        yield (
            f"{counted(last.nodes, 'node')}: a failure every {hours:.3g} h, "
            f"{compute.availability(last.nodes):.1%} of the time is left to train"
        )
    for each in predictions:
        who = f"{counted(each.setting.ranks, 'rank')}, {each.setting.name}"
        for remark in _remarks(each):
            yield f"{who}: {remark}"


def _best(found: Sequence[Prediction], base: Prediction) -> str:
    """Return which setting is the best, and how it compares."""
    enough = max(each.means[_SPEED] for each in found) / (1 + _GAIN)
    # The first of those that are as good drops least.
    best = next(each for each in found if each.means[_SPEED] >= enough)
    means = best.means
    text = (
        f"{best.setting.name}: {means['updates_per_second']:.3g} updates/s, "
        f"{means[_SPEED]:.4g} samples/s"
    )
    if best is not base:
        text += f" ({means[_SPEED] / base.means[_SPEED] - 1:+.0%} to "
        text += f"{base.setting.name})"
    if means["dropped"]:
        text += f", {means['dropped']:.1%} dropped"
    if means["mean_lag"]:
        text += f", mean lag {means['mean_lag']:.2g}"
    return text


def _remarks(found: Prediction) -> Iterator[str]:
    """Yield what is notable about a prediction."""
    setting, waiting = found.setting, found.waiting
    if found.means["busiest_link"] > _BUSY:
        more = min(2 * setting.servers, setting.nodes)
        cure = f": try --servers {more}" if setting.servers < setting.nodes else ""
        yield "the busiest link is the bottleneck" + cure * setting.has_server
    if found.means["server_utilisation"] > _BUSY:
        yield "the server is the bottleneck"
    slow = [str(r) for r, each in enumerate(waiting) if each < max(waiting) - _SLOW]
    if slow and setting.quorum in (None, setting.ranks) and setting.synchronous:
        who = ", ".join(slow[:8]) + ", ..." * (len(slow) > 8)
        yield f"all wait for {counted(len(slow), 'rank')}: {who}"
    yield from found.doubts
