"""``hpcaccum sbatch``: writes a batch script for SLURM. It needs no MPI."""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from hpcaccum import InvalidArgumentError
from hpcaccum.bench import options as bench_options
from hpcaccum.bench.command import needs_mpi
from hpcaccum.launch import doctor, sbatch_warnings
from hpcaccum.launch.batch_script import MARGIN, Job, script
from hpcaccum.train import options as train_options

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# What the script of a training sets.
_CHOSEN = ("save", "resume", "log", "plot")
_NAMES = {"train": "hpcaccum-train", "bench": "hpcaccum-bench"}
# Commands that are started as any other program.
_OTHERS = {"doctor": doctor.add_arguments}
_MODULE = ("python", "-m", "hpcaccum")
_DEFAULTS = {
    "nodes": 1,
    "ranks_per_node": 4,
    "cpus_per_rank": 1,
    "gpus_per_node": 0,
    "time": "1:00:00",
    "name": None,
    "launcher": "srun",
    "sweep": (),
}
# Days-hours:minutes:seconds, as sbatch reads them.
_TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options to the parser."""
    parser.usage = "%(prog)s [options] -- train ... | bench ... | PROGRAM ..."
    parser.set_defaults(**_DEFAULTS)
    _add_size(parser)
    _add_script(parser)
    parser.add_argument(
        "program",
        nargs=argparse.REMAINDER,
        help="train or bench with their options, or any other program and its "
        "arguments. `bench` without a benchmark makes a job array of several",
    )


def _add_size(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--nodes", type=_count, help="number of nodes (1)")
    parser.add_argument(
        "--ranks-per-node", type=_count, metavar="N", help="ranks on each node (4)"
    )
    parser.add_argument(
        "--cpus-per-rank",
        type=_count,
        metavar="N",
        help="cores, and threads of NumPy's linear algebra, of a rank (1)",
    )
    parser.add_argument(
        "--gpus-per-node",
        type=_count,
        metavar="N",
        help="GPUs, which the ranks of a node share (none)",
    )
    parser.add_argument(
        "--time",
        type=_time,
        help="time limit as sbatch reads it: minutes, H:M:S or D-H:M:S (1:00:00). A "
        "training is queued again before the time limit",
    )
    parser.add_argument(
        "--sweep",
        type=_counts,
        metavar="1,2,4",
        help="with a benchmark: measure on so many nodes, one after the other, in "
        "ascending order",
    )


def _add_script(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--name", type=_name, help="of the job (that of the program)")
    parser.add_argument(
        "--launcher",
        choices=("srun", "mpiexec"),
        help="what starts the ranks; mpiexec where srun does not know the MPI (srun)",
    )
    parser.add_argument(
        "--setup",
        action="append",
        default=[],
        metavar="COMMAND",
        help="shell command before the program, such as 'module load openmpi'; may be "
        "repeated",
    )
    parser.add_argument(
        "--sbatch",
        type=_option,
        action="append",
        default=[],
        metavar="OPTION",
        help="another option of sbatch, as --sbatch=--partition=gpu; may be repeated",
    )


def prepare(args: argparse.Namespace) -> Callable[[], None]:
    """Check the arguments; return what prints the script.

    Raises:
        InvalidArgumentError: If an option, or one of the program, is wrong.
    """
    return functools.partial(print, script(_job(args)), end="")


def _job(args: argparse.Namespace) -> Job:
    words = _words(args)
    for each in (*words, *args.setup, *args.sbatch):
        if "\n" in each:
            raise InvalidArgumentError(
                f"{each!r} has a line break, which the first lines of a script cannot "
                f"have: put it into a file"
            )
    nodes = max(args.sweep, default=args.nodes)
    if args.nodes not in (nodes, _DEFAULTS["nodes"]):
        raise InvalidArgumentError(
            f"--nodes {args.nodes}: with --sweep the job asks for {nodes}, the largest "
            f"of its numbers"
        )
    array = words[0] == "bench" and _names_no_benchmark(words)
    if array and args.sweep:
        raise InvalidArgumentError("--sweep needs one benchmark: bench step")
    for text in _check(words, args, nodes * args.ranks_per_node):
        print(f"hpcaccum sbatch: warning: {text}", file=sys.stderr)
    return Job(
        call=_call(args, words),
        words=words,
        name=args.name or _NAMES.get(words[0], "hpcaccum"),
        nodes=nodes,
        ranks_per_node=args.ranks_per_node,
        cpus_per_rank=args.cpus_per_rank,
        gpus_per_node=args.gpus_per_node,
        time=args.time,
        launcher=args.launcher,
        setup=tuple(args.setup),
        options=tuple(args.sbatch),
        benchmarks=_array(args) if array else (),
        sweep=args.sweep,
    )


def _words(args: argparse.Namespace) -> tuple[str, ...]:
    """Return the program and its arguments; commands of hpcaccum without its name."""
    words = tuple(args.program)
    words = words[1:] if words[:1] == ("--",) else words
    words = words[1:] if words[:1] == ("hpcaccum",) else words
    if not words:
        raise InvalidArgumentError("no program: hpcaccum sbatch [options] -- train ...")
    if words[0] in _OTHERS:
        return (*_MODULE, *words)
    return words


def _array(args: argparse.Namespace) -> tuple[str, ...]:
    """Return the benchmarks of an array: of `all`, and that between nodes."""
    wire = (bench_options.WIRE,) if args.nodes > 1 else ()
    return (*bench_options.BENCHMARKS, *wire)


def _names_no_benchmark(words: tuple[str, ...]) -> bool:
    return len(words) == 1 or words[1].startswith("-")


def _check(
    words: tuple[str, ...], args: argparse.Namespace, ranks: int
) -> Iterator[str]:
    """Check the program's options as it will do when it starts, maybe days later.

    Returns:
        Warnings about what may be otherwise where the job runs.
    """
    if words[0] != "bench" and _seconds(args.time) < 2 * MARGIN:
        raise InvalidArgumentError(
            f"--time must be at least {2 * MARGIN // 60} minutes: {MARGIN} s before "
            f"its end, the ranks are asked to stop"
        )
    if args.sweep and (words[0] != "bench" or args.launcher != "srun"):
        raise InvalidArgumentError("--sweep is for a benchmark that srun starts")
    if words[0] == "train":
        return _check_train(words, args, ranks)
    if words[0] == "bench":
        return _check_bench(words, args)
    if words[:3] == _MODULE and words[3] in _OTHERS:
        _parsed(words[3], _OTHERS[words[3]], words[4:])
    return sbatch_warnings.of_program(words, (*_NAMES, *_OTHERS))


def _check_train(
    words: tuple[str, ...], args: argparse.Namespace, ranks: int
) -> Iterator[str]:
    found = _parsed("train", train_options.add_arguments, words[1:])
    for name in _CHOSEN:
        if getattr(found, name):
            raise InvalidArgumentError(f"train --{name}: the script sets it")
    if found.compare:
        raise InvalidArgumentError(
            "train --compare cannot be continued; use --strategy"
        )
    # The script adds it.
    found.save = Path("checkpoints")
    train_options.resolve(found, ranks)
    return sbatch_warnings.of_training(found, args)


def _check_bench(words: tuple[str, ...], args: argparse.Namespace) -> Iterator[str]:
    calls = [words[1:]]
    if _names_no_benchmark(words):
        calls = [(name, *words[1:]) for name in _array(args)]
    parsed = [_parsed("bench", bench_options.add_arguments, each) for each in calls]
    for found in parsed:
        _check_benchmark(found, args, several=len(calls) > 1 or len(args.sweep) > 1)
    warnings = (sbatch_warnings.of_benchmark(found, args) for found in parsed)
    # Each once.
    return iter(dict.fromkeys(itertools.chain.from_iterable(warnings)))


def _check_benchmark(
    found: argparse.Namespace, args: argparse.Namespace, several: bool
) -> None:
    name = found.benchmark
    if not needs_mpi(found):
        raise InvalidArgumentError(f"bench {name} needs no job")
    if getattr(found, "json", None):
        raise InvalidArgumentError("bench --json: the script sets it")
    for option in ("csv", "plot"):
        if several and getattr(found, option, None):
            raise InvalidArgumentError(
                f"bench --{option}: several runs of this job would write that file"
            )
    if name == bench_options.WIRE and min(args.sweep or (args.nodes,)) == 1:
        raise InvalidArgumentError(f"bench {name} needs at least 2 nodes")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        unknown = re.match(r"unrecognized arguments: --([\w-]+)", message)
        own = (*_DEFAULTS, "setup", "sbatch")
        if unknown and unknown[1].replace("-", "_") in own:
            message += "; options of sbatch come before --"
        raise InvalidArgumentError(f"{self.prog}: {message}")


def _parsed(
    program: str,
    add: Callable[[argparse.ArgumentParser], None],
    words: tuple[str, ...],
) -> argparse.Namespace:
    parser = _Parser(prog=program)
    add(parser)
    return parser.parse_args(words)


def _call(args: argparse.Namespace, words: tuple[str, ...]) -> tuple[str, ...]:
    """Return the words that write the same script again."""
    given: list[str] = []
    for name, default in _DEFAULTS.items():
        value = getattr(args, name)
        if value != default:
            text = ",".join(map(str, value)) if name == "sweep" else str(value)
            given += [f"--{name.replace('_', '-')}", text]
    for name in ("setup", "sbatch"):
        given += [f"--{name}={each}" for each in getattr(args, name)]
    return (*given, "--", *words)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a number from 1, got {text!r}")
    return int(text)


def _counts(text: str) -> tuple[int, ...]:
    return tuple(sorted({_count(part) for part in text.split(",")}))


def _name(text: str) -> str:
    # It begins names of files, which follow options, and is part of messages.
    if not re.fullmatch(r"[\w.+][\w.+-]*", text):
        raise argparse.ArgumentTypeError(
            f"must have letters, digits and . _ + - only, no - at first, got {text!r}"
        )
    return text


def _option(text: str) -> str:
    if not re.fullmatch(r"--?\w\S*( \S.*)?", text):
        raise argparse.ArgumentTypeError(
            f"must look like --partition=gpu, got {text!r}"
        )
    return text


def _time(text: str) -> str:
    if not _TIME.fullmatch(text):
        raise argparse.ArgumentTypeError(
            f"must be minutes, M:S, H:M:S or D-H[:M[:S]], got {text!r}"
        )
    return text


def _seconds(time: str) -> float:
    """Return a time limit of sbatch in seconds; for SLURM, 0 is none."""
    found = _TIME.fullmatch(time)
    assert found
    days, one, two, three = (int(each or 0) for each in found.groups())
    if days == one == two == three == 0:
        return math.inf
    if found[1]:
        return ((days * 24 + one) * 60 + two) * 60 + three
    if found[4]:
        return (one * 60 + two) * 60 + three
    return one * 60 + two
