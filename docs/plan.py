"""Compare `hpcaccum plan` with ranks that sleep: python docs/plan.py.

It fits the costs of an exchange with `hpcaccum bench plan` on 4 ranks, then runs each
case on 2 to 32 ranks, whose computation of a gradient is a sleep, so that a few cores
are enough. Then it does the same on 4 hosts made of namespaces, which needs root. It
writes the tables of plan.md. The ranks run this file, too.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import hpcaccum as hpc
from hpcaccum.plan.compute import Draws, compute
from hpcaccum.plan.prediction import Prediction, predict
from hpcaccum.plan.setting import Machine, Setting, machine

HERE = Path(__file__).parent
BEGIN, END = "<!-- docs/plan.py writes from here -->", "<!-- to here -->"
COMPUTES = (
    "30ms",
    "lognormal 30ms 0.3",
    "lognormal 30ms 0.1; rank 1 +45ms",
)
# The ranks on which the costs are fitted; the error is that on more.
FITTED = 4
PERIOD = 5
# A mean lag may also be wrong by so much, as half an update is no matter.
LAG = 0.3
HOSTS = HERE.parent / "tests" / "cluster" / "hosts.py"


class Place(NamedTuple):
    """Where ranks run.

    Attributes:
        nodes: How many; more than one are hosts made of namespaces.
        rate: Of the link of a host.
        parameters: Of the model.
        ranks: Numbers of ranks.
    """

    nodes: int
    rate: str
    parameters: int
    ranks: Sequence[int]

    def job(self, ranks: int) -> list[str | Path]:
        """Return the command that starts a program on so many ranks."""
        if self.nodes == 1:
            return [Path(sysconfig.get_path("scripts")) / "mpiexec", "-n", str(ranks)]
        each = str(ranks // self.nodes)
        shape = ["-n", str(self.nodes), "-r", each, "--rate", self.rate, "--"]
        return [sys.executable, HOSTS, *shape]


# On hosts, a gradient is so long that links carry a good part of what they can.
ONE_NODE = Place(1, "", 1000, (2, 4, 8, 16, 32))
FOUR_HOSTS = Place(4, "1gbit", 250_000, (4, 8, 16))


def settings(where: Place, ranks: int) -> list[Setting]:
    """Return what is compared on a number of ranks."""
    nbytes = 4 * where.parameters
    place = {"ranks": ranks, "nodes": where.nodes, "nbytes": nbytes}
    place["servers"] = Setting.automatic_servers(nbytes, where.nodes)
    quorum = max(1, round(0.75 * ranks))
    return [
        Setting("cross-shard", **{**place, "servers": 1}),
        Setting("sync-replicas", **place, quorum=quorum, staleness=0),
        Setting("sync-replicas", **place, quorum=quorum, staleness=1),
        Setting("drop-stale", **place, staleness=ranks),
        Setting("agn", **place, period=PERIOD),
        Setting("local-steps", **place, period=PERIOD, quorum=quorum, staleness=0),
    ]


# The ranks


def optimizer(setting: Setting) -> Any:
    """Return the optimizer of a setting."""
    rule = hpc.SGD(0.1)
    if setting.strategy == "cross-shard":
        return hpc.CrossShardOptimizer(rule)
    if setting.strategy == "sync-replicas":
        lateness = "inverse" if setting.staleness else None
        return hpc.SyncReplicasOptimizer(rule, setting.quorum, lateness=lateness)
    if setting.strategy == "drop-stale":
        return hpc.DropStaleGradientOptimizer(rule, int(setting.staleness))
    if setting.strategy == "local-steps":
        more = {} if setting.quorum is None else {"quorum": setting.quorum}
        return hpc.LocalStepsOptimizer(rule, hpc.SGD(1.0), setting.period, **more)
    return hpc.AGNOptimizer(rule, communication_period=setting.period)


def train(setting: Setting, text: str, seconds: float, updates: int) -> None:
    """Train on all ranks with gradients that are a sleep; rank 0 prints what it took.

    Args:
        setting: The setting.
        text: Of ``--compute``.
        seconds: For which each rank goes on, if it can stop when it wants.
        updates: Made by ranks that stop together.
    """
    from mpi4py import MPI

    comm, stops_alone = MPI.COMM_WORLD, setting.has_server
    draws = Draws(compute(text), setting, comm.rank)
    me = np.array([comm.rank])
    sleeps = itertools.chain.from_iterable(
        draws.draw(me, 100)[0].tolist() for _ in itertools.count()
    )
    var = hpc.Variable(np.zeros(setting.nbytes // 4, np.float32), "x")
    grads = [np.zeros_like(var.value)]

    def loss() -> tuple[float, list[Any]]:
        time.sleep(next(sleeps))
        return 0.0, grads

    opt = optimizer(setting)
    opt.initialize([var])
    comm.Barrier()
    begun, receipts = time.monotonic(), []
    for number in itertools.count(1):
        receipts.append(opt.minimize(loss))
        took = time.monotonic() - begun
        if took > seconds if stops_alone else number == updates:
            break
    made = opt.global_step if stops_alone else updates
    if stops_alone:
        opt.leave()
    sent = [each for each in receipts if each.sent]
    lags, dropped = sum(r.lag for r in sent), sum(not r for r in sent)
    counts = np.array(comm.allgather((len(sent), lags, dropped))).sum(axis=0)
    opt.free()
    if comm.rank == 0:
        measured = made / took, counts[2] / counts[0], counts[1] / counts[0]
        print(json.dumps(measured))


def run(
    where: Place, setting: Setting, text: str, seconds: float, guess: float
) -> list[float]:
    """Return updates a second, the share that is dropped and the mean lag of a job."""
    words = [json.dumps(vars(setting)), text, str(seconds), str(guess)]
    job = [*where.job(setting.ranks), sys.executable, __file__, "--rank"]
    done = subprocess.run(
        [*job, *words], capture_output=True, text=True, check=True, timeout=300
    )
    found = next(line for line in done.stdout.splitlines() if line.startswith("["))
    return json.loads(found)  # type: ignore[no-any-return]


# The comparison


def predicted(found: Prediction) -> list[float]:
    """Return what `run` measures, as predicted."""
    names = "updates_per_second", "dropped", "mean_lag"
    return [found.means[name] for name in names]


def error(expected: list[float], measured: list[float]) -> tuple[float, float, float]:
    """Return the errors: relative, absolute, and relative beyond `LAG`."""
    speed, dropped, lag = (a - b for a, b in zip(expected, measured, strict=True))
    late = 0.0 if abs(lag) <= LAG else abs(lag) / measured[2]
    return abs(speed) / measured[0], abs(dropped), late


def compare(where: Place, costs: Machine, seconds: float) -> list[Any]:
    """Return a row for each case: its setting, its text, predicted, measured."""
    rows = []
    for number, text in itertools.product(where.ranks, COMPUTES):
        for setting in settings(where, number):
            found = predict(setting, costs, compute(text), updates=2000, seeds=range(3))
            expected = predicted(found)
            guess = max(20, round(seconds * expected[0]))
            measured = run(where, setting, text, seconds, guess)
            rows.append((setting, text, expected, measured))
            print(setting.strategy, number, text, expected, measured, flush=True)
    return rows


def table(where: Place, rows: list[Any]) -> list[str]:
    """Return the lines of the table, and the errors of what was not fitted."""
    joined = f" and links of {where.rate}" if where.rate else ""
    nodes = "1 node" if where.nodes == 1 else f"{where.nodes} hosts"
    lines = [
        f"On {nodes}, with {where.parameters:,} parameters{joined}:",
        "",
        "| ranks | compute | strategy | updates/s | dropped | mean lag |",
        "|---|---|---|---|---|---|",
    ]
    for setting, text, expected, measured in rows:
        cells = [str(setting.ranks), f"`{text}`", setting.name]
        for form, a, b in zip(
            ("{:.1f}", "{:.3f}", "{:.1f}"), expected, measured, strict=True
        ):
            cells.append(f"{form.format(a)} / {form.format(b)}")
        lines.append(f"| {' | '.join(cells)} |")
    errors = [error(e, m) for setting, _, e, m in rows if setting.ranks > FITTED]
    if not errors:
        return [*lines, ""]
    speed, dropped, lag = zip(*errors, strict=True)
    lines += [
        "",
        f"The error on more than {FITTED} ranks is, in the median and at most, "
        f"{statistics.median(speed):.1%} and {max(speed):.1%} of updates/s, "
        f"{statistics.median(dropped):.3f} and {max(dropped):.3f} of the share that is "
        f"dropped, and {statistics.median(lag):.1%} and {max(lag):.1%} of the mean "
        f"lag, where that is wrong by more than {LAG}.",
        "",
    ]
    return lines


def main() -> None:
    """Fit, compare, and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=6.0, help="of a run (6)")
    parser.add_argument("--places", type=int, nargs="+", default=(0, 1))
    parser.add_argument("--ranks", type=int, nargs="+", help="instead of all")
    parser.add_argument("--dry", action="store_true", help="do not write the page")
    args = parser.parse_args()
    lines = list[str]()
    for number in args.places:
        where = (ONE_NODE, FOUR_HOSTS)[number]
        where = where._replace(ranks=args.ranks or where.ranks)
        lines += table(where, compare(where, fit(where), args.seconds))
    print(*lines, sep="\n")
    if not args.dry:
        page = HERE / "plan.md"
        before, _, rest = page.read_text().partition(BEGIN)
        after = rest.partition(END)[2]
        page.write_text("\n".join([before + BEGIN, *lines[:-1], END + after]))


def fit(where: Place) -> Machine:
    """Return the costs that `hpcaccum bench plan` finds on few ranks."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "plan.json"
        command = [sys.executable, "-m", "hpcaccum", "bench", "plan", "--json", file]
        subprocess.run([*where.job(FITTED), *command], check=True)
        return machine(os.fspath(file))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        facts, text, seconds, updates = sys.argv[2:]
        train(Setting(**json.loads(facts)), text, float(seconds), int(updates))
    else:
        main()
