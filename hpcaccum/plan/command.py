"""``hpcaccum plan``: the options, the settings that they stand for, and the run."""

from __future__ import annotations

import argparse
import functools
import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hpcaccum import option_values as values
from hpcaccum.dtypes import float_dtype
from hpcaccum.errors import InvalidArgumentError
from hpcaccum.files import JsonLines, check_apart, ending_the_job
from hpcaccum.plan.compute import MORE, compute
from hpcaccum.plan.prediction import LEGEND, MODEL, draw, lines, predict, words
from hpcaccum.plan.setting import NETWORK, STRATEGIES, Machine, Setting, machine
from hpcaccum.plots import check_picture

# Parts of the ranks that are tried as quorums, if none is given.
_QUORUMS = (1.0, 0.97, 0.94, 0.875, 0.75)
_USUAL = "usual costs of an exchange (--network has those of bench plan)"
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
    needed = functools.partial(group.add_argument, required=True)
    needed("--ranks", type=values.counts, metavar="N", help=text)
    text = f"time of a gradient: {values.A_DISTRIBUTION}; then, after a ; each: {MORE}"
    needed("--compute", type=compute, metavar="TEXT", help=text.replace("%", "%%"))
    add("--nodes", values.count, "nodes, with a block of ranks each (1)", 1)
    add("--network", machine, f"{NETWORK} (those of a usual node)", None, "TEXT")
    add("--parameters", values.parameters, "parameters, such as 25M (1M)", 10**6)
    add("--dtype", str, "of the parameters (float32)", "float32", "DTYPE")
    text = "share of the parameters of which a gradient has rows (100%%)"
    add("--touched", values.share, text, 1.0, "SHARE")
    add("--batch", values.count, "samples of one gradient (1)", 1)
    text = "noise scale of gradients, in samples: see train --log (not known)"
    add("--noise-scale", values.positive, text)

    group = parser.add_argument_group("what is tried, each with each")
    add = functools.partial(values.add, group)
    every = *STRATEGIES, "all"
    named: dict[str, Any] = {"choices": every, "nargs": "+", "default": ["all"]}
    text = f"{', '.join(every)} (all)"
    group.add_argument("--strategy", **named, metavar="NAME", help=text)
    add("--quorum", values.counts, _QUORUM)
    add("--staleness", values.several(values.whole), _STALENESS)
    text = "sync-replicas: gradients that are one update late count, too"
    values.add_flag(group, "--lateness", text)
    text = "gradients between pushes of agn and local-steps (10)"
    add("--period", values.counts, text, [10])
    text = "local-steps: parts of the parameters, pushed in turns (1)"
    add("--fragments", values.counts, text, [1])
    # 0 stands for auto.
    servers = values.several(lambda text: 0 if text == "auto" else values.count(text))
    text = "servers, on different nodes, or auto, as of the optimizers (auto)"
    add("--servers", servers, text, [0])

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


def prepare(args: argparse.Namespace) -> Callable[[], None]:
    """Check all options; return the command, ready to call."""
    found = _settings(args)
    check_apart({"--json": args.json, "--plot": args.plot}, {})
    check_picture(args.plot)
    return functools.partial(_run, args, found, JsonLines("--json", args.json))


def _settings(args: argparse.Namespace) -> list[Setting]:
    chosen = STRATEGIES if "all" in args.strategy else args.strategy
    nbytes = args.parameters * float_dtype(args.dtype, "--dtype").itemsize
    found = list[Setting]()
    for ranks, strategy in itertools.product(args.ranks, chosen):
        nodes = min(args.nodes, ranks)
        lost = args.compute.lost(ranks, nodes)
        auto = Setting.automatic_servers(nbytes, nodes)
        tried = _tried(strategy, args, ranks, nodes, auto)
        for options in itertools.product(*tried.values()):
            named = dict(zip(tried, options, strict=True), batch=args.batch, lost=lost)
            named["touched"] = args.touched
            found.append(Setting(strategy, ranks, nodes, nbytes, **named))
    return list(dict.fromkeys(found))


def _tried(
    strategy: str, args: argparse.Namespace, ranks: int, nodes: int, auto: int
) -> dict[str, Any]:
    """Return the values of each option of a strategy."""
    if strategy == "cross-shard":
        return {}
    sparse = args.touched < 1
    servers = [each or (1 if sparse else auto) for each in args.servers]
    if sparse and max(servers) > 1:
        raise InvalidArgumentError("--servers: sparse variables have one server")
    if (most := max(servers)) > nodes:
        raise InvalidArgumentError(
            f"--servers: {most} servers need as many nodes; {ranks} ranks have {nodes}"
        )
    if (most := max(args.quorum or [0])) > ranks:
        raise InvalidArgumentError(f"--quorum: {most} is more than {ranks} ranks")
    if strategy == "sync-replicas":
        quorum = args.quorum or [max(1, round(part * ranks)) for part in _QUORUMS]
        return {"servers": servers, "quorum": quorum, "staleness": [int(args.lateness)]}
    if strategy == "drop-stale":
        return {"servers": servers, "staleness": args.staleness or [2 * ranks]}
    local = {"servers": servers, "period": args.period}
    if strategy == "agn":
        return local
    if (most := max(args.fragments)) > min(args.period):
        raise InvalidArgumentError(
            f"--fragments must be at most --period, got {most} and {min(args.period)}"
        )
    if args.quorum and args.staleness:
        raise InvalidArgumentError(
            "local-steps has --quorum or --staleness, not both: with a quorum, late "
            "pushes are dropped (--strategy chooses other strategies)"
        )
    staleness = [0] if args.quorum else args.staleness or [math.inf]
    local |= {"quorum": args.quorum or [None], "staleness": staleness}
    return local | {"fragments": args.fragments}


def _run(args: argparse.Namespace, found: list[Setting], output: JsonLines) -> None:
    costs = args.network or Machine()
    title = (
        f"{args.parameters} parameters in {args.dtype}, a gradient takes "
        f"{args.compute.text}\n{args.network or _USUAL}"
    )
    legend = [LEGEND, MODEL] if args.noise_scale else [LEGEND]
    print(title, *legend, "", sep="\n", flush=True)
    seeds = range(args.seed, args.seed + args.repeats)
    more = {"compute": args.compute.text, "seed": args.seed, "machine": vars(costs)}
    more |= {"fitted": costs.ranks > 0, "noise_scale": args.noise_scale}
    predictions = []
    for setting in found:
        each = predict(
            setting, costs, args.compute, args.updates, seeds, args.noise_scale
        )
        output.write({**each.facts(), **more})
        predictions.append(each)
    output.close()
    print(*lines(predictions), "", sep="\n")
    print(*words(predictions, args.compute), sep="\n")
    more_samples = "" if args.noise_scale else ", or with more samples,"
    print(f"how fast the loss falls with a lag{more_samples} is not predicted")
    if args.plot:
        with ending_the_job("--plot", args.plot):
            draw(predictions, title, args.plot)
        print(f"picture: {args.plot}")
