"""The options of ``hpcaccum plan``, and the settings that they stand for."""

from __future__ import annotations

import argparse
import itertools
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcaccum import option_values as values
from hpcaccum.dtypes import float_dtype
from hpcaccum.errors import InvalidArgumentError
from hpcaccum.plan.compute import compute
from hpcaccum.plan.machine import machine
from hpcaccum.plan.setting import STRATEGIES, Setting, automatic_servers

if TYPE_CHECKING:
    from collections.abc import Iterator

_POWERS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "B": 10**9}
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
    group = parser.add_argument_group("the job")

    def add(name: str, kind: Any, metavar: str, default: Any, text: str) -> None:
        group.add_argument(name, type=kind, default=default, metavar=metavar, help=text)

    text = "ranks, such as 32, 4,6 or 4:1024, which doubles them"
    group.add_argument("--ranks", type=counts, required=True, metavar="N", help=text)
    text = "time of a gradient: 30ms, 'normal 30ms 3ms', 'lognormal 30ms 0.3', whose "
    text += "mean is 30ms, 'exponential 30ms', or a file of times or of train --trace; "
    text += "then, after a ; each: '6%% x3' or '6%% x2-10' of the gradients, 'rank 7 "
    text += "+45ms', 'node 2,3 x1.5', 'failures 0.01/h restart 5m' of each node"
    group.add_argument(
        "--compute", type=compute, required=True, metavar="TEXT", help=text
    )
    add("--nodes", values.count, "N", 1, "nodes, with a block of ranks each (1)")
    text = "what bench plan --json wrote, or latency and rate of a node and between "
    text += "nodes, such as '1us 25GB/s; 2us 12GB/s' (those of a usual node)"
    add("--network", machine, "TEXT", None, text)
    add("--parameters", parameters, "N", 10**6, "parameters, such as 25M (1M)")
    add("--dtype", str, "DTYPE", "float32", "of the parameters (float32)")
    add("--batch", values.count, "N", 1, "samples of one gradient (1)")

    group = parser.add_argument_group("what is tried, each with each")
    every = *STRATEGIES, "all"
    group.add_argument(
        "--strategy",
        choices=every,
        nargs="+",
        default=["all"],
        metavar="NAME",
        help=f"{', '.join(every)} (all)",
    )
    text = "gradients in an update: of sync-replicas (some, from 3/4 of the ranks on), "
    add("--quorum", counts, "N", None, f"{text}and of local-steps (none)")
    text = "largest lag that counts: of drop-stale (twice the ranks), and of "
    add("--staleness", _lags, "N", None, f"{text}local-steps (any)")
    text = "sync-replicas: gradients that are one update late count, too"
    group.add_argument("--lateness", action="store_true", help=text)
    text = "gradients between pushes of agn and local-steps (10)"
    add("--period", counts, "N", [10], text)
    text = "local-steps: parts of the parameters, pushed in turns (1)"
    add("--fragments", counts, "N", [1], text)
    add("--servers", _servers, "N", [1], "servers, on different nodes, or auto (1)")

    group = parser.add_argument_group("simulation and output")
    text = "updates of a simulation; more if each gradient makes one (1000)"
    add("--updates", values.count, "N", 1000, text)
    text = "simulations of each setting, for the intervals (5)"
    add("--repeats", values.count, "N", 5, text)
    add("--seed", values.whole, "N", 0, "of the random numbers (0)")
    add("--json", Path, "FILE", None, "write a JSON line for each setting")
    text = f"draw samples a second and lags ({', '.join(values.PICTURES)})"
    add("--plot", values.picture, "FILE", None, text)


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
    auto = automatic_servers(nbytes, nodes)
    tried: dict[str, Any] = {"servers": [each or auto for each in args.servers]}
    if (most := max(tried["servers"])) > nodes:
        raise InvalidArgumentError(
            f"--servers: {most} servers need as many nodes; {ranks} ranks have {nodes}"
        )
    if (most := max(args.quorum or [0])) > ranks:
        raise InvalidArgumentError(f"--quorum: {most} is more than {ranks} ranks")
    if strategy == "sync-replicas":
        usual = [max(1, round(part * ranks)) for part in _QUORUMS]
        tried.update(quorum=args.quorum or usual, staleness=[int(args.lateness)])
    elif strategy == "drop-stale":
        tried["staleness"] = args.staleness or [2 * ranks]
    else:
        tried["period"] = args.period
    if strategy == "local-steps":
        # With a quorum, late pushes are dropped.
        lag = [0] if args.quorum else args.staleness or [math.inf]
        tried.update(quorum=args.quorum or [None], staleness=lag)
        tried["fragments"] = args.fragments
        if (most := max(args.fragments)) > min(args.period):
            raise InvalidArgumentError(
                f"--fragments must be at most --period, got {most} and "
                f"{min(args.period)}"
            )
    for chosen in itertools.product(*tried.values()):
        yield dict(zip(tried, chosen, strict=True))
