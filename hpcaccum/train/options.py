"""The options of ``hpcaccum train``: their names, defaults and checks."""

from __future__ import annotations

import argparse
from pathlib import Path

from hpcaccum import InvalidArgumentError
from hpcaccum import option_values as values
from hpcaccum.errors import RESTART, counted
from hpcaccum.files import check_apart
from hpcaccum.option_values import add, add_flag
from hpcaccum.stopping import INTERRUPTED

STRATEGIES = ("cross-shard", "sync-replicas", "drop-stale", "agn", "local-steps")

# Each reaches 97 % test accuracy on the digits with every strategy, on 1 to 8 ranks;
# with local-steps from 4 ranks on.
DEFAULT_RATES = {"sgd": 0.2, "momentum": 0.02, "adagrad": 0.1, "adam": 0.003}

DEFAULT_PICTURE = Path("hpcaccum-compare.png")

# Seldom enough that saving a large model costs little.
DEFAULT_EVERY = values.Every(seconds=300.0)

# Those whose ranks train alone for a period, and options that only some have.
PERIODIC = ("agn", "local-steps")
_ONLY_FOR = {
    "quorum": ("sync-replicas", "local-steps"),
    "staleness": ("drop-stale",),
    "period": PERIODIC,
}


# Those of `add_arguments`, by their names, and those that `resolve` adds.
Options = argparse.Namespace


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add all options to the parser."""
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--strategy", choices=STRATEGIES, help="how gradients are exchanged"
    )
    add_flag(what, "--compare", "train with all of them, one after the other")
    _add_task(parser.add_argument_group("training"))
    _add_exchange(parser.add_argument_group("gradient exchange"))
    _add_output(parser.add_argument_group("output besides the tables"))
    _add_checkpoints(parser.add_argument_group("checkpoints"))


def _add_task(group: argparse._ArgumentGroup) -> None:
    text = "arrays x (n, features) and y (n,), y of integers; optionally x_test and "
    text += "y_test, by default a fifth of each class (default: scikit-learn's digits)"
    add(group, "--data", Path, text, metavar="FILE.npz")
    text = "widths of the hidden layers (64)"
    add(group, "--hidden", values.several(values.count), text, [64], "64,32")
    add(group, "--batch", values.count, "samples of one gradient (16)", 16)
    text = "passes over the training set, by all ranks together; dropped gradients do "
    add(group, "--epochs", values.count, f"{text}not count (30)", 30)
    add(group, "--seed", values.whole, "seed of weights and batches (0)", 0)
    rates = ", ".join(f"{name} {rate}" for name, rate in DEFAULT_RATES.items())
    add(group, "--rate", values.positive, f"learning rate ({rates})", metavar="RATE")
    group.add_argument(
        "--optimizer", choices=DEFAULT_RATES, default="sgd", help="update rule (sgd)"
    )
    group.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="device that computes gradients; ranks of a node share its GPUs (cpu)",
    )


def _add_exchange(group: argparse._ArgumentGroup) -> None:
    text = "sync-replicas, local-steps: gradients or pushes of an update (all but one "
    text += "of the ranks; all of 2)"
    add(group, "--quorum", values.count, text)
    text = "drop-stale: largest lag of a gradient, in updates (twice the ranks)"
    add(group, "--staleness", values.whole, text)
    text = "agn, local-steps: batches between pushes (10)"
    add(group, "--period", values.count, text)
    text = "ranks that hold and update the parameters, such as 0,8,16, on different "
    text += "nodes; or auto (auto; not for cross-shard)"
    add(group, "--servers", values.servers, text, "auto", "RANKS")
    text = "servers only apply updates and do not train (not for cross-shard)"
    add_flag(group, "--dedicated", text)
    group.add_argument(
        "--straggler",
        type=values.straggler,
        action="append",
        default=[],
        metavar="RANK:MILLISECONDS",
        help="delay every gradient of a rank by that many milliseconds; may be "
        "repeated",
    )


def _add_output(group: argparse._ArgumentGroup) -> None:
    text = "write a log in JSON lines; with --resume, append to it"
    add(group, "--log", Path, text, metavar="FILE.jsonl")
    text = "plot accuracy, loss, staleness and samples per rank (default with "
    text += f"--compare: {DEFAULT_PICTURE})"
    add(group, "--plot", values.picture, text, metavar="FILE.png")
    add_flag(group, "--no-plot", "do not plot")
    text = "write what each rank did when, to be opened in https://ui.perfetto.dev"
    add(group, "--trace", Path, text, metavar="FILE.json")


def _add_checkpoints(group: argparse._ArgumentGroup) -> None:
    text = "write checkpoints to a directory, for one run at a time: the model, and "
    text += "what is needed to continue; the last three are kept"
    add(group, "--save", Path, text, metavar="DIR")
    text = "write one after N updates, or after a time such as 90s, 5m or 1h (5m); one "
    add(group, "--every", values.every, f"{text}more at the end", metavar="N|TIME")
    text = "continue from the last checkpoint of --save; without one, start anew. Its "
    text += "updates count, also those of another number of ranks"
    add_flag(group, "--resume", text)
    text = "stop after a time such as 55m, as after SIGTERM or SIGUSR1 to any rank: "
    text += f"with --save, write a checkpoint; end with status {RESTART}. "
    text += f"Ctrl-C does the same, with status {INTERRUPTED}"
    add(group, "--time-limit", values.time, text, None, "TIME")


def resolve(args: argparse.Namespace, ranks: int) -> Options:
    """Return the options for a number of ranks, on which some defaults depend.

    More of them: ``strategies`` to train with; the ``host``, which has the whole model;
    the ranks that ``only_serve``; the number of ``workers``, which train; and the
    ``reporter``, the first of these, which evaluates the model and writes all output.
    ``straggler`` is the delay of each gradient of a rank, in milliseconds.
    """
    options = Options(**vars(args))
    # The user must know those that only serve, so "auto" is rank 0 then.
    servers = (0,) if args.servers == "auto" else args.servers
    options.host, options.only_serve = servers[0], servers if args.dedicated else ()
    options.workers = ranks - len(options.only_serve)
    _check_combinations(args)
    try:
        _check_ranks(options, ranks)
    except InvalidArgumentError as error:
        if ranks > 1:
            raise
        raise InvalidArgumentError(
            f"{error}; there is only 1 rank; start several: mpiexec -n 4 hpcaccum "
            f"train ..."
        ) from None
    options.strategies = STRATEGIES if args.compare else (args.strategy,)
    options.straggler = dict(args.straggler)
    options.every = args.every or DEFAULT_EVERY
    if args.no_plot:
        options.plot = None
    elif args.compare:
        options.plot = args.plot or DEFAULT_PICTURE
    for name, default in (
        ("rate", DEFAULT_RATES[options.optimizer]),
        ("quorum", max(options.workers - 1, min(options.workers, 2))),
        ("staleness", 2 * ranks),
        ("period", 10),
    ):
        if getattr(options, name) is None:
            setattr(options, name, default)
    options.reporter = min({*range(ranks)} - {*options.only_serve})
    outputs = {"--log": options.log, "--plot": options.plot, "--trace": options.trace}
    check_apart(outputs, {"--data": options.data})
    return options


def _check_combinations(args: argparse.Namespace) -> None:
    """Raise if an option would have no effect."""
    for name in ("every", "resume"):
        if getattr(args, name) and args.save is None:
            raise InvalidArgumentError(f"--{name} needs --save DIR")
    if args.compare:
        if args.save:
            raise InvalidArgumentError("--save is for one run: use --strategy")
        return
    for name, default in ("dedicated", False), ("servers", "auto"):
        if args.strategy == "cross-shard" and getattr(args, name) != default:
            raise InvalidArgumentError(f"--{name} cannot be used with cross-shard")
    for name, strategies in _ONLY_FOR.items():
        if getattr(args, name) is not None and args.strategy not in strategies:
            raise InvalidArgumentError(
                f"--{name} is for {' and '.join(strategies)}, not for {args.strategy}"
            )


def _check_ranks(options: Options, ranks: int) -> None:
    """Raise if an option does not suit the number of ranks."""
    servers = () if options.servers == "auto" else options.servers
    if max(servers, default=0) >= ranks or len(set(servers)) < len(servers):
        raise InvalidArgumentError(
            f"--servers must be different ranks of 0 to {ranks - 1}, got "
            f"{','.join(map(str, servers))}"
        )
    if options.workers == 0:
        raise InvalidArgumentError(
            f"--dedicated needs more than {counted(ranks, 'rank')}: no rank would train"
        )
    if options.quorum and options.quorum > options.workers:
        raise InvalidArgumentError(
            f"--quorum must be at most {options.workers}, the ranks that train, got "
            f"{options.quorum}"
        )
    for rank in dict(options.straggler):
        if rank >= ranks:
            raise InvalidArgumentError(
                f"--straggler {rank}:... must be a rank of 0 to {ranks - 1}"
            )
