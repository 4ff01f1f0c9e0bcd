"""``hpcaccum plan``: the options, the settings that they stand for, and the run."""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcaccum import option_values as values
from hpcaccum.dtypes import float_dtype
from hpcaccum.errors import InvalidArgumentError
from hpcaccum.files import JsonLines, check_apart, ending_the_job
from hpcaccum.plan import advice
from hpcaccum.plan.compute import compute
from hpcaccum.plan.machine import Machine, machine
from hpcaccum.plan.setting import STRATEGIES, Setting, automatic_servers
from hpcaccum.plan.simulation import predict
from hpcaccum.plots import check_picture

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_POWERS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "B": 10**9}
# Parts of the ranks that are tried as quorums, if none is given.
_QUORUMS = (1.0, 0.97, 0.94, 0.875, 0.75)
_USUAL = "usual costs of an exchange (--network has those of bench plan)"
_COMPUTE = """\
time of a gradient: 30ms, 'normal 30ms 3ms', 'lognormal 30ms 0.3', whose mean is 30ms,
'exponential 30ms', or a file of times or of train --trace; then, after a ; each:
'6%% x3' or '6%% x2-10' of the gradients, 'rank 7 +45ms', 'node 2,3 x1.5',
'failures 0.01/h restart 5m' of each node"""
_NETWORK = """\
what bench plan --json wrote, or latency and rate of a node and between nodes, such as
'1us 25GB/s; 2us 12GB/s' (those of a usual node)"""
_QUORUM = """\
gradients in an update: of sync-replicas (some, from 3/4 of the ranks on), and of
local-steps (none)"""
_STALENESS = """\
largest lag that counts: of drop-stale (twice the ranks), and of local-steps (any)"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add all options to the parser."""
    group = parser.add_argument_group("the job")
    add = functools.partial(values.add, group)
    text = "ranks, such as 32, 4,6 or 4:1024, which doubles them"
    group.add_argument("--ranks", type=_counts, required=True, metavar="N", help=text)
    group.add_argument(
        "--compute", type=compute, required=True, metavar="TEXT", help=_COMPUTE
    )
    add("--nodes", values.count, "nodes, with a block of ranks each (1)", 1)
    add("--network", machine, _NETWORK, None, "TEXT")
    add("--parameters", _parameters, "parameters, such as 25M (1M)", 10**6)
    add("--dtype", str, "of the parameters (float32)", "float32", "DTYPE")
    add("--batch", values.count, "samples of one gradient (1)", 1)

    group = parser.add_argument_group("what is tried, each with each")
    add = functools.partial(values.add, group)
    every = *STRATEGIES, "all"
    text = f"{', '.join(every)} (all)"
    group.add_argument(
        "--strategy",
        choices=every,
        nargs="+",
        default=["all"],
        metavar="NAME",
        help=text,
    )
    add("--quorum", _counts, _QUORUM)
    add("--staleness", _wholes, _STALENESS)
    text = "sync-replicas: gradients that are one update late count, too"
    values.add_flag(group, "--lateness", text)
    add(
        "--period",
        _counts,
        "gradients between pushes of agn and local-steps (10)",
        [10],
    )
    text = "local-steps: parts of the parameters, pushed in turns (1)"
    add("--fragments", _counts, text, [1])
    add("--servers", _servers, "servers, on different nodes, or auto (1)", [1])

    group = parser.add_argument_group("simulation and output")
    add = functools.partial(values.add, group)
    text = "updates of a simulation; more if each gradient makes one (1000)"
    add("--updates", values.count, text, 1000)
    text = "simulations of each setting, for the intervals (5)"
    add("--repeats", values.count, text, 5)
    add("--seed", values.whole, "of the random numbers (0)", 0)
    add("--json", Path, "write a JSON line for each setting", None, "FILE")
    text = f"draw samples a second and lags ({', '.join(values.PICTURES)})"
    add("--plot", values.picture, text, None, "FILE")


def _counts(text: str) -> list[int]:
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


def _parameters(text: str) -> int:
    """Return a number such as 25M."""
    found = re.fullmatch(r"([0-9]+\.?[0-9]*)([KMGB]?)", text)
    if not found or not float(found[1]):
        raise argparse.ArgumentTypeError(
            f"must be a number such as 25M, 1.5G or 1000, got {text!r}"
        )
    return round(float(found[1]) * _POWERS[found[2]])


def _wholes(text: str) -> list[int]:
    return [values.whole(each) for each in text.split(",")]


def _servers(text: str) -> list[int]:
    """Return numbers; 0 stands for auto."""
    return [0 if each == "auto" else values.count(each) for each in text.split(",")]


def prepare(args: argparse.Namespace) -> Callable[[], None]:
    """Check all options; return the command, ready to call."""
    found = _settings(args)
    check_apart({"--json": args.json, "--plot": args.plot}, {})
    if args.plot:
        check_picture(args.plot)
    return functools.partial(_run, args, found, JsonLines("--json", args.json))


def _settings(args: argparse.Namespace) -> list[Setting]:
    chosen = STRATEGIES if "all" in args.strategy else args.strategy
    nbytes = args.parameters * float_dtype(args.dtype, "--dtype").itemsize
    found = list[Setting]()
    for ranks, strategy in itertools.product(args.ranks, chosen):
        nodes = min(args.nodes, ranks)
        args.compute.check(ranks, nodes)
        for options in _options(strategy, args, ranks, nodes, nbytes):
            found.append(Setting(strategy, ranks, nodes, nbytes, **options))
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


def _run(args: argparse.Namespace, found: list[Setting], output: JsonLines) -> None:
    costs = args.network or Machine()
    title = (
        f"{args.parameters} parameters in {args.dtype}, a gradient takes "
        f"{args.compute.text}\n{_USUAL if args.network is None else args.network}"
    )
    print(title, advice.LEGEND, "", sep="\n", flush=True)
    seeds = range(args.seed, args.seed + args.repeats)
    predictions = []
    for setting in found:
        prediction = predict(
            setting, costs, args.compute, args.updates, seeds, args.batch
        )
        facts = prediction.facts()
        facts.update(compute=args.compute.text, seed=args.seed)
        output.write({**facts, "machine": vars(costs), "fitted": costs.ranks > 0})
        predictions.append(prediction)
    output.close()
    print(*advice.lines(predictions), "", sep="\n")
    print(*advice.words(predictions, args.compute), sep="\n")
    print("how fast the loss falls with a lag, or with more samples, is not predicted")
    if args.plot:
        from hpcaccum.plan.plot import draw

        with ending_the_job("--plot", args.plot):
            draw(predictions, title, args.plot)
        print(f"picture: {args.plot}")
