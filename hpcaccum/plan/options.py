"""The options of ``hpcaccum plan``, and the settings that they stand for."""

from __future__ import annotations

import argparse
import itertools
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING

from hpcaccum import option_values as values
from hpcaccum.dtypes import float_dtype
from hpcaccum.errors import InvalidArgumentError
from hpcaccum.plan.compute import compute
from hpcaccum.plan.machine import machine
from hpcaccum.plan.setting import STRATEGIES, Setting

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

_POWERS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "B": 10**9}
# Bytes of parameters from which on servers="auto" takes several.
_LARGE = 1 << 20
# Parts of the ranks that are tried as quorums, if none is given.
_QUORUMS = (1.0, 0.97, 0.94, 0.875, 0.75)


def counts(text: str) -> list[int]:
    """Return the numbers of a text such as 4,6 or 4:64, which doubles them."""
    found = list[int]()
    for part in text.split(","):
        first, colon, last = part.partition(":")
        found.append(values.count(first))
        if colon:
            end = values.count(last)
            if end < found[-1]:
                raise argparse.ArgumentTypeError(
                    f"must be numbers such as 4,6 or a range such as 4:64, got {text!r}"
                )
            while 2 * found[-1] <= end:
                found.append(2 * found[-1])
    return list(dict.fromkeys(found))


def parameters(text: str) -> int:
    """Return a number such as 25M."""
    found = re.fullmatch(r"([0-9]+\.?[0-9]*)([KMGB]?)", text)
    if not found or not float(found[1]):
        raise argparse.ArgumentTypeError(
            f"must be a number such as 25M, 1.5G or 1000, got {text!r}"
        )
    return round(float(found[1]) * _POWERS[found[2]])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add all options to the parser."""

    def add(
        group: argparse._ArgumentGroup,
        name: str,
        kind: Callable[[str], Any],
        default: Any,
        metavar: str,
        text: str,
    ) -> None:
        group.add_argument(name, type=kind, default=default, metavar=metavar, help=text)

    job = parser.add_argument_group("the job")
    text = "ranks, such as 32, 4,6 or 4:1024, which doubles them"
    job.add_argument("--ranks", type=counts, required=True, metavar="N", help=text)
    add(job, "--nodes", values.count, 1, "N", "nodes, with a block of ranks each (1)")
    text = "time of a gradient: 30ms, 'normal 30ms 3ms', 'lognormal 30ms 0.3', whose "
    text += "mean is 30ms, 'exponential 30ms', or a file of times or of train --trace; "
    text += "then, after a ; each: '6%% x3' or '6%% x2-10' of the gradients, 'rank 7 "
    text += "+45ms', 'node 2,3 x1.5', 'failures 0.01/h restart 5m' of each node"
    job.add_argument(
        "--compute", type=compute, required=True, metavar="TEXT", help=text
    )
    text = "what bench plan --json wrote, or latency and rate of a node and between "
    text += "nodes, such as '1us 25GB/s; 2us 12GB/s' (a usual node)"
    add(job, "--network", machine, None, "TEXT", text)
    add(job, "--parameters", parameters, 10**6, "N", "parameters, such as 25M (1M)")
    add(job, "--dtype", str, "float32", "DTYPE", "of the parameters (float32)")
    add(job, "--batch", values.count, 1, "N", "samples of one gradient (1)")

    tried = parser.add_argument_group("what is tried, each with each")
    tried.add_argument(
        "--strategy",
        choices=(*STRATEGIES, "all"),
        nargs="+",
        default=["all"],
        help="(all)",
    )
    text = "gradients in an update: of sync-replicas (some, from 3/4 of the ranks on), "
    add(tried, "--quorum", counts, None, "N", f"{text}and of local-steps (none)")
    text = "largest lag that counts: of drop-stale (twice the ranks), and of "
    add(tried, "--staleness", _lags, None, "N", f"{text}local-steps (any)")
    text = "gradients between pushes of agn and local-steps (10)"
    add(tried, "--period", counts, [10], "N", text)
    text = "local-steps: parts of the parameters, pushed in turns (1)"
    add(tried, "--fragments", counts, [1], "N", text)
    text = "with a quorum, a gradient of the previous round joins the open one"
    tried.add_argument("--lateness", action="store_true", help=text)
    text = "servers, on different nodes, or auto (1)"
    add(tried, "--servers", _servers, [1], "N", text)

    runs = parser.add_argument_group("simulation and output")
    text = "updates of a simulation; more if each gradient makes one (1000)"
    add(runs, "--updates", values.count, 1000, "N", text)
    text = "simulations of each setting, for the intervals (5)"
    add(runs, "--repeats", values.count, 5, "N", text)
    add(runs, "--seed", values.whole, 0, "N", "of the random numbers (0)")
    add(runs, "--json", Path, None, "FILE", "write a JSON line for each setting")
    text = "draw samples a second and lags"
    add(runs, "--plot", values.picture, None, "FILE.png", text)


def _lags(text: str) -> list[int]:
    return [values.whole(each) for each in text.split(",")]


def _servers(text: str) -> list[int]:
    """Return numbers; 0 stands for auto."""
    return [0 if each == "auto" else values.count(each) for each in text.split(",")]


def settings(args: argparse.Namespace) -> list[Setting]:
    """Return all settings, or raise InvalidArgumentError."""
    chosen = STRATEGIES if "all" in args.strategy else args.strategy
    nbytes = args.parameters * float_dtype(args.dtype, "--dtype").itemsize
    found = list[Setting]()
    for ranks in args.ranks:
        nodes = min(args.nodes, ranks)
        args.compute.check(ranks, nodes)
        place = {"ranks": ranks, "nodes": nodes, "nbytes": nbytes}
        for strategy in dict.fromkeys(chosen):
            for options in _options(strategy, args, ranks, nodes, nbytes):
                found.append(Setting(strategy, **place, **options))
    return list(dict.fromkeys(found))


def _options(
    strategy: str, args: argparse.Namespace, ranks: int, nodes: int, nbytes: int
) -> Iterator[dict[str, Any]]:
    """Yield the options of one strategy, each with each."""
    if strategy == "cross-shard":
        yield {}
        return
    auto, joins = nodes if nbytes >= _LARGE else 1, int(args.lateness)
    tried: dict[str, list[Any]] = {"servers": [each or auto for each in args.servers]}
    if max(tried["servers"]) > nodes:
        raise InvalidArgumentError(
            f"--servers: {max(tried['servers'])} servers need as many nodes; {ranks} "
            f"ranks are on {nodes}"
        )
    if strategy == "sync-replicas":
        usual = [max(1, round(part * ranks)) for part in _QUORUMS]
        tried["quorum"], tried["staleness"] = args.quorum or usual, [joins]
    if strategy == "drop-stale":
        tried["staleness"] = [2 * ranks] if args.staleness is None else args.staleness
    if strategy in ("agn", "local-steps"):
        tried["period"] = args.period
    if strategy == "local-steps":
        tried["fragments"] = args.fragments
        tried["quorum"] = args.quorum or [None]
        any_lag = [joins if args.quorum else math.inf]
        tried["staleness"] = any_lag if args.staleness is None else args.staleness
        if max(args.fragments) > min(args.period):
            raise InvalidArgumentError(
                f"--fragments must be at most --period, got {max(args.fragments)} "
                f"and {min(args.period)}"
            )
    for chosen in itertools.product(*tried.values()):
        yield dict(zip(tried, chosen, strict=True))
