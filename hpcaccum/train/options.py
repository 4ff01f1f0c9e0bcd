"""The options of ``hpcaccum train``: their names, defaults and checks."""

from __future__ import annotations

import argparse
import itertools
import math
import os
import signal
from dataclasses import dataclass
from pathlib import Path

from hpcaccum import InvalidArgumentError, option_values
from hpcaccum.optimizers import check_groups
from hpcaccum.option_values import Every, Groups, Servers

STRATEGIES = ("cross-shard", "sync-replicas", "drop-stale", "agn")

# Each reaches 97 % test accuracy on the digits with every strategy, on 1 to 8 ranks.
DEFAULT_RATES = {"sgd": 0.2, "momentum": 0.02, "adagrad": 0.1, "adam": 0.003}

DEFAULT_PICTURE = "hpcaccum-compare.png"

# Options that the parser checks completely.
_AS_GIVEN = (
    "data",
    "hidden",
    "optimizer",
    "batch",
    "epochs",
    "seed",
    "device",
    "dedicated",
    "servers",
    "log",
    "trace",
    "save",
    "resume",
    "time_limit",
)

# Options of one strategy.
_ONLY_FOR = {
    "quorum": "sync-replicas",
    "staleness": "drop-stale",
    "period": "agn",
    "groups": "cross-shard",
}

_ALONE = "there is only 1 rank; start several: mpiexec -n 4 hpcaccum train ..."

# Seldom enough that saving a large model costs little.
DEFAULT_EVERY = Every(seconds=300.0)


@dataclass(frozen=True)
class Options:
    """The options of one call of ``hpcaccum train``, the same on all ranks.

    Attributes:
        strategies: Strategies to train with, one after the other.
        batch: Number of samples in one gradient.
        epochs: The amount of work, see `loop.Run`.
        straggler: Rank to the delay of each of its gradients, in milliseconds.
        groups: Shard groups; empty means one group of all ranks.
        save: Directory of checkpoints.
        every: How often one is written.
        resume: Whether to continue from the last one, if there is one.
        time_limit: Seconds after which to stop; infinite if there is none.
    """

    strategies: tuple[str, ...]
    data: Path | None
    hidden: tuple[int, ...]
    optimizer: str
    rate: float
    batch: int
    epochs: int
    seed: int
    device: str
    staleness: int
    quorum: int
    period: int
    groups: Groups
    dedicated: bool
    servers: Servers
    straggler: dict[int, float]
    log: Path | None
    plot: Path | None
    trace: Path | None
    save: Path | None
    every: Every
    resume: bool
    time_limit: float

    @property
    def host(self) -> int:
        """The first server."""
        return 0 if isinstance(self.servers, str) else self.servers[0]

    @property
    def only_serve(self) -> tuple[int, ...]:
        """The ranks that do not train."""
        return _only_serve(self.servers, self.dedicated)

    @property
    def reporter(self) -> int:
        """The first rank that trains; it evaluates the model and writes all output."""
        return next(rank for rank in itertools.count() if rank not in self.only_serve)

    def keepers(self, strategy: str) -> list[int]:
        """Return the ranks that have all of a model: the host, or one of each group.

        That of a shard group is the first of its list, as for `CrossShardOptimizer`.
        """
        groups = self.groups if strategy == "cross-shard" else []
        host = 0 if strategy == "cross-shard" else self.host
        return [ranks[0] for ranks in groups] or [host]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add all options to the parser."""
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--strategy", choices=STRATEGIES, help="how gradients are exchanged"
    )
    what.add_argument(
        "--compare",
        action="store_true",
        help="train with all four, one after the other",
    )
    _add_task(parser.add_argument_group("training"))
    _add_exchange(parser.add_argument_group("gradient exchange"))
    output = parser.add_argument_group("output besides the tables")
    output.add_argument(
        "--log", type=Path, metavar="FILE.jsonl", help="write a log in JSON lines"
    )
    output.add_argument(
        "--plot",
        type=option_values.picture,
        metavar="FILE.png",
        help="plot accuracy, loss, staleness and samples per rank (default with "
        f"--compare: {DEFAULT_PICTURE})",
    )
    output.add_argument("--no-plot", action="store_true", help="do not plot")
    output.add_argument(
        "--trace",
        type=Path,
        metavar="FILE.json",
        help="write what each rank did when, to be opened in https://ui.perfetto.dev",
    )
    _add_checkpoints(parser.add_argument_group("checkpoints"))


def _add_task(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--data",
        type=Path,
        metavar="FILE.npz",
        help="arrays x (n, features) and y (n,), y of integers; optionally x_test and "
        "y_test, by default a fifth of each class (default: scikit-learn's digits)",
    )
    group.add_argument(
        "--hidden",
        type=option_values.widths,
        default=(64,),
        metavar="64,32",
        help="widths of the hidden layers (64)",
    )
    group.add_argument(
        "--optimizer", choices=DEFAULT_RATES, default="sgd", help="update rule (sgd)"
    )
    rates = ", ".join(f"{name} {rate}" for name, rate in DEFAULT_RATES.items())
    group.add_argument(
        "--rate", type=option_values.positive, help=f"learning rate ({rates})"
    )
    group.add_argument(
        "--batch",
        "--batch-size",
        type=option_values.count,
        default=16,
        help="samples of one gradient (16)",
    )
    group.add_argument(
        "--epochs",
        type=option_values.count,
        default=30,
        help="passes over the training set, by all ranks together; dropped gradients "
        "do not count (30)",
    )
    group.add_argument(
        "--seed",
        type=option_values.whole,
        default=0,
        help="seed of weights and batches (0)",
    )
    group.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="device that computes gradients; ranks of a node share its GPUs (cpu)",
    )


def _add_checkpoints(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--save",
        type=Path,
        metavar="DIR",
        help="write checkpoints to a directory, for one run at a time: the model, and "
        "what is needed to continue; the last three are kept",
    )
    group.add_argument(
        "--every",
        type=option_values.every,
        metavar="N|TIME",
        help="write one after N updates, or after a time such as 90s, 5m or 1h (5m); "
        "one more is written at the end",
    )
    group.add_argument(
        "--resume",
        action="store_true",
        help="continue from the last checkpoint of --save; without one, start anew. "
        "Its updates count, also those of another number of ranks",
    )
    group.add_argument(
        "--time-limit",
        type=option_values.time,
        default=math.inf,
        metavar="TIME",
        help="stop after a time such as 55m, as after SIGTERM or SIGUSR1 to any rank: "
        f"with --save, write a checkpoint; end with status {os.EX_TEMPFAIL}. Ctrl-C "
        f"does the same, with status {128 + signal.SIGINT}",
    )


def _add_exchange(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--quorum",
        type=option_values.count,
        help="sync-replicas: gradients in one update (one less than the ranks that "
        "train)",
    )
    group.add_argument(
        "--staleness",
        type=option_values.whole,
        help="drop-stale: largest lag of a gradient, in updates (twice the ranks)",
    )
    group.add_argument(
        "--period", type=option_values.count, help="agn: batches between pushes (10)"
    )
    group.add_argument(
        "--groups",
        type=option_values.groups,
        default=[],
        metavar="0,1/2,3",
        help="cross-shard: groups of ranks that average, all of one size; each has "
        "its own model",
    )
    group.add_argument(
        "--dedicated",
        action="store_true",
        help="servers only apply updates and do not train (not for cross-shard)",
    )
    group.add_argument(
        "--servers",
        type=option_values.servers,
        default=(0,),
        metavar="RANKS",
        help="ranks that hold and update the parameters, such as 0,8,16, on different "
        "nodes; or auto (0; not for cross-shard)",
    )
    group.add_argument(
        "--straggler",
        type=option_values.straggler,
        action="append",
        default=[],
        metavar="RANK:MILLISECONDS",
        help="delay every gradient of a rank by that many milliseconds; may be "
        "repeated",
    )


def resolve(args: argparse.Namespace, ranks: int) -> Options:
    """Return the options for a number of ranks, on which some defaults depend."""
    _check_servers(args.servers, ranks)
    workers = ranks - len(_only_serve(args.servers, args.dedicated))
    strategies = STRATEGIES if args.compare else (args.strategy,)
    _check_exchange(args)
    if args.dedicated and workers == 0:
        needs = f"--dedicated needs {ranks + 1} ranks"
        alone = f"there are only {ranks}" if ranks > 1 else _ALONE
        raise InvalidArgumentError(f"{needs}: {alone}")
    _check_saving(args)
    rate, staleness = args.rate, args.staleness
    period = 10 if args.period is None else args.period
    return Options(
        strategies=strategies,
        rate=DEFAULT_RATES[args.optimizer] if rate is None else rate,
        quorum=_quorum(args.quorum, workers, ranks),
        staleness=2 * ranks if staleness is None else staleness,
        period=period,
        groups=_checked_groups(args.groups, ranks),
        straggler=_stragglers(args, ranks),
        plot=_picture(args),
        every=args.every or DEFAULT_EVERY,
        **{name: getattr(args, name) for name in _AS_GIVEN},
    )


def _check_exchange(args: argparse.Namespace) -> None:
    """Raise if an option would have no effect on the one strategy that is chosen."""
    if args.compare:
        return
    if args.dedicated and args.strategy == "cross-shard":
        raise InvalidArgumentError("--dedicated cannot be used with cross-shard")
    if args.servers != (0,) and args.strategy == "cross-shard":
        raise InvalidArgumentError("--servers cannot be used with cross-shard")
    for name, strategy in _ONLY_FOR.items():
        if getattr(args, name) not in (None, []) and strategy != args.strategy:
            raise InvalidArgumentError(
                f"--{name} is for {strategy}, not for {args.strategy}"
            )


def _only_serve(servers: Servers, dedicated: bool) -> tuple[int, ...]:
    # The user must know them, so "auto" is the host then.
    ranks = (0,) if isinstance(servers, str) else servers
    return ranks if dedicated else ()


def _check_servers(servers: Servers, ranks: int) -> None:
    if isinstance(servers, str):
        return
    if max(servers) >= ranks or len(set(servers)) < len(servers):
        alone = f": {_ALONE}" if ranks == 1 else ""
        raise InvalidArgumentError(
            f"--servers must be different ranks, 0 to {ranks - 1}{alone}, got "
            f"{','.join(map(str, servers))}"
        )


def _check_saving(args: argparse.Namespace) -> None:
    for name in ("every", "resume"):
        if getattr(args, name) and args.save is None:
            raise InvalidArgumentError(f"--{name} needs --save DIR")
    if args.compare and args.save:
        raise InvalidArgumentError("--save is for one run: use --strategy")


def _quorum(quorum: int | None, workers: int, ranks: int) -> int:
    if quorum is None:
        return max(workers - 1, 1)
    if quorum > workers:
        raise InvalidArgumentError(
            f"--quorum must be at most {workers}, the ranks that train, got {quorum}"
            + (f"; {_ALONE}" if ranks == 1 else "")
        )
    return quorum


def _checked_groups(groups: Groups, ranks: int) -> Groups:
    try:
        return check_groups(groups, ranks)
    except InvalidArgumentError as error:
        text = str(error).replace("group_assignment", "--groups")
        alone = f"; {_ALONE}" if ranks == 1 else ""
        raise InvalidArgumentError(f"{text}{alone}") from None


def _stragglers(args: argparse.Namespace, ranks: int) -> dict[int, float]:
    for rank, _ in args.straggler:
        if rank >= ranks:
            there = f"there are {ranks} ranks, 0 to {ranks - 1}"
            raise InvalidArgumentError(
                f"--straggler {rank}:...: {_ALONE if ranks == 1 else there}"
            )
    return dict(args.straggler)


def _picture(args: argparse.Namespace) -> Path | None:
    path: Path | None = args.plot or (Path(DEFAULT_PICTURE) if args.compare else None)
    return None if args.no_plot else path
