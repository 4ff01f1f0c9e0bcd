"""``hpcaccum bench plan``: what an exchange costs here, for ``hpcaccum plan``.

Ranks whose computation is a sleep train in several ways. The costs are those with
which the simulation of ``hpcaccum plan`` takes the same times.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from hpcaccum import (
    SGD,
    CrossShardOptimizer,
    DropStaleGradientOptimizer,
    Group,
    InvalidArgumentError,
    SyncReplicasOptimizer,
    Variable,
)
from hpcaccum.bench.report import size_text, time_text
from hpcaccum.files import JsonLines, check_new
from hpcaccum.machine import circumstances, describe
from hpcaccum.plan.compute import compute
from hpcaccum.plan.setting import Machine, Setting
from hpcaccum.plan.simulation import simulate
from hpcaccum.spans import Recorder, recorded_by
from hpcaccum.tables import table

# Seconds of a gradient, for each of these sizes.
_SLEEP = 5e-3
_SIZES = (1 << 12, 1 << 22)
# Steps that are measured, at least; those of the warm-up.
_LEAST = 5
# Seconds between two looks of a rank that does not take part.
_NAP = 10e-3
# Steps of the fit; what a cost is multiplied by to find its derivative; damping.
_STEPS, _CHANGE, _DAMPING = 16, 1.1, 1e-3
# Updates of a simulation.
_UPDATES = 100


class Measured(NamedTuple):
    """Seconds of an update by all ranks, of its server, and of a rank's core."""

    setting: Setting
    seconds: float
    update: float
    work: float


def prepare(args: argparse.Namespace, group: Group) -> Callable[[], None]:
    """Check the arguments; return the command, ready to call. Collective."""

    def check() -> JsonLines:
        if group.size < 2:
            raise InvalidArgumentError("bench plan needs 2 ranks, better 4")
        path = None if group.rank else args.json
        if not args.force:
            check_new({"--json": path})
        return JsonLines("--json", path)

    output = group.agree("bench plan", check, facts=lambda _: {})
    return functools.partial(_run, args.seconds, group, output)


def _run(seconds: float, group: Group, output: JsonLines) -> None:
    facts = circumstances(group)
    if group.rank == 0:
        print(describe(facts), flush=True)
    measured = [
        Measured(setting, *_measure(setting, seconds, group))
        for setting in _settings(group)
    ]
    if group.rank:
        return
    costs = fit(measured, facts["cores"])
    took = [simulated(each.setting, costs) for each in measured]
    rows, residuals = list[tuple[str, ...]](), list[dict[str, Any]]()
    for (setting, real, *_), found in zip(measured, took, strict=True):
        times = time_text(1e6 * real), time_text(1e6 * found)
        size = str(setting.ranks), str(setting.nodes), size_text(setting.nbytes)
        rows.append((setting.strategy, *size, *times, f"{found / real - 1:+.1%}"))
        fields = dataclasses.asdict(setting)
        residuals.append({**fields, "measured": real, "fitted": found})
    titles = "strategy", "ranks", "nodes", "size", "measured", "fitted", "residual"
    print(*table(titles, rows), "", sep="\n")
    for name, value in vars(costs).items():
        print(f"{name:8} {value:.4g}")
    # The residuals have infinity, which JSON has not.
    for each in residuals:
        each["staleness"] = min(each["staleness"], 1 << 30)
    output.write({**facts, "machine": vars(costs), "residuals": residuals})
    output.close()


def _settings(group: Group) -> list[Setting]:
    """Return what is measured."""
    nodes, found = len(group.nodes), list[Setting]()
    sizes = [2, group.size] if nodes == 1 else [group.size]
    for ranks, nbytes in itertools.product(dict.fromkeys(sizes), _SIZES):
        cross_shard = Setting("cross-shard", ranks, nodes, nbytes)
        served = functools.partial(
            dataclasses.replace,
            cross_shard,
            servers=Setting.automatic_servers(nbytes, nodes),
        )
        found += [
            cross_shard,
            served(strategy="sync-replicas", quorum=ranks, staleness=0),
            served(strategy="drop-stale"),
        ]
    return found


def _measure(setting: Setting, seconds: float, group: Group) -> tuple[float, ...]:
    """Return the numbers of `Measured` for the first ranks. Collective."""
    trains = group.rank < setting.ranks
    part = group.comm.Split(trains, group.rank)
    took = _train(setting, seconds, part) if trains else ()
    # Others would spin in MPI, and take the cores of those that train.
    over = group.comm.Ibarrier()
    while not over.Test():
        time.sleep(_NAP)
    part.Free()
    return group.comm.bcast(took)  # type: ignore[no-any-return]


def _train(setting: Setting, seconds: float, comm: Any) -> tuple[float, ...]:
    var = Variable(np.zeros(setting.nbytes // 4, np.float32), "x")
    grads, slept = [np.zeros_like(var.value)], _SLEEP

    def loss() -> tuple[float, list[Any]]:
        time.sleep(slept)
        return 0.0, grads

    rule = SGD(0.1)
    opt: Any
    if setting.strategy == "cross-shard":
        opt = CrossShardOptimizer(rule, comm=comm)
    elif setting.strategy == "sync-replicas":
        opt = SyncReplicasOptimizer(rule, setting.ranks, comm=comm)
    else:
        opt = DropStaleGradientOptimizer(rule, 1 << 30, comm=comm)
    opt.initialize([var])

    def steps(count: int) -> Any:
        took, work = [], time.process_time()
        for _ in range(count):
            begun = time.perf_counter()
            opt.minimize(loss)
            took.append(time.perf_counter() - begun)
        # Other programs disturb the mean, but not the median.
        mine = np.median(took), (time.process_time() - work) / count
        return np.median(comm.allgather(mine), axis=0)

    took, _ = steps(_LEAST)
    count = max(_LEAST, round(seconds / took))
    (took, work), slept, recorder = steps(count), 0.0, Recorder()
    if setting.strategy == "drop-stale":
        # An idle server takes longer for an update: its core sleeps, too.
        with recorded_by(recorder):
            steps(count)
    opt.free()
    events = itertools.chain.from_iterable(recorder.rows().values())
    updates = [e.end - e.begin for e in events if e.label.name == "update"]
    # The longer ones have waited for a core.
    return float(took), float(np.percentile(updates or [0.0], 25)), float(work)


def simulated(setting: Setting, costs: Machine) -> float:
    """Return what `_measure` does, simulated."""
    found = simulate(setting, costs, compute(f"{_SLEEP}s"), _UPDATES, 0)
    each = setting.ranks if setting.strategy == "drop-stale" else 1
    return each * found.seconds / found.updates


def fit(measured: Sequence[Measured], cores: int) -> Machine:
    """Return the costs with which simulations take the measured times.

    A node has so many cores.

    By the method of Levenberg and Marquardt, for the logarithms of the costs.
    """
    settings = [each.setting for each in measured]
    nodes = max(each.nodes for each in settings)
    names = ["call", "turn", "reduce", "copy"]
    names += ["latency", "link"] if nodes > 1 else []
    costs = Machine(
        update=min(each.update for each in measured if each.update),
        # Small gradients cost little but their admission.
        work=max(each.work for each in measured if each.setting.nbytes == _SIZES[0]),
        cores=cores,
        ranks=max(-(-each.ranks // each.nodes) for each in settings),
        nodes=nodes,
        nbytes=max(each.nbytes for each in settings),
    )
    real = np.log([each.seconds for each in measured])

    def residuals(costs: Machine) -> Any:
        took = [simulated(each.setting, costs) for each in measured]
        return np.log(took) - real

    def changed(costs: Machine, factors: Sequence[float]) -> Machine:
        new = {n: getattr(costs, n) * f for n, f in zip(names, factors, strict=True)}
        return dataclasses.replace(costs, **new)

    found, damping = residuals(costs), _DAMPING
    for _ in range(_STEPS):
        each = np.eye(len(names)) * math.log(_CHANGE)
        slopes = [residuals(changed(costs, np.exp(row))) - found for row in each]
        jacobian = np.stack(slopes, axis=1) / math.log(_CHANGE)
        normal = jacobian.T @ jacobian
        normal += damping * np.eye(len(names))
        step = np.linalg.solve(normal, -jacobian.T @ found)
        new = changed(costs, np.exp(np.clip(step, -1, 1)))
        better = residuals(new)
        if better @ better < found @ found:
            costs, found, damping = new, better, damping / 3
        else:
            damping *= 10
    return costs
