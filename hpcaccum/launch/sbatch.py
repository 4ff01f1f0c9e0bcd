"""``hpcaccum sbatch``: fills in a script of the folder ``slurm``. It needs no MPI."""

from __future__ import annotations

import argparse
import functools
import re
import shlex
from collections.abc import Callable, Iterable
from typing import NoReturn

from hpcaccum import InvalidArgumentError
from hpcaccum.bench import options as bench_options
from hpcaccum.bench.command import needs_mpi
from hpcaccum.files import shipped
from hpcaccum.option_values import add, count, counts
from hpcaccum.train import options as train_options

# What sbatch calls our options.
_NAMES = {
    "nodes": "nodes",
    "ranks_per_node": "ntasks-per-node",
    "cpus_per_rank": "cpus-per-task",
    "gpus_per_node": "gpus-per-node",
    "time": "time",
    "name": "job-name",
}
# A limit of less than four minutes, as sbatch reads it: M, M:S or H:M:S.
_SHORT = re.compile(r"(0+:)?0*[1-3](:\d+)?")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options to the parser."""
    parser.usage = "%(prog)s [options] -- train ... | bench ... | PROGRAM ..."
    add(parser, "--nodes", count, "number of nodes (1)", 1)
    add(parser, "--ranks-per-node", count, "ranks on each node (4)", 4)
    text = "cores, and threads of NumPy's linear algebra (1)"
    add(parser, "--cpus-per-rank", count, text)
    add(parser, "--gpus-per-node", count, "GPUs (none; 4 with train --device cuda)")
    kind = _like(r"(\d+-)?\d+(:\d+){0,2}", "be minutes, M:S, H:M:S or D-H[:M[:S]]")
    text = "time limit: minutes, H:M:S or D-H:M:S (1:00:00; 30 for benchmarks)"
    add(parser, "--time", kind, text, metavar=None)
    text = "with bench: measure on each of these numbers of nodes in turn"
    add(parser, "--sweep", counts, text, [], "1,2,4")
    # It begins names of files, which follow options.
    text = "have only letters, digits and . _ + -, not - first"
    kind = _like(r"[\w.+][\w.+-]*", text)
    text = "name of the job (the name of the program)"
    add(parser, "--name", kind, text, metavar=None)
    parser.add_argument(
        "--launcher",
        choices=("srun", "mpiexec"),
        default="srun",
        help="what starts the ranks (srun); mpiexec if srun does not support the MPI",
    )
    several = functools.partial(parser.add_argument, action="append", default=[])
    several(
        "--setup",
        metavar="COMMAND",
        help="shell command before the program: 'module load openmpi'; may be repeated",
    )
    several(
        "--sbatch",
        type=_like(r"--?\w\S*( \S.*)?", "look like --partition=gpu"),
        metavar="OPTION",
        help="another sbatch option: --sbatch=--partition=gpu; may be repeated",
    )
    parser.add_argument(
        "program",
        nargs=argparse.REMAINDER,
        help="train or bench with their options, or any other program",
    )


def prepare(args: argparse.Namespace) -> Callable[[], None]:
    """Check the arguments, also those of the program; return what prints the script."""
    words = args.program[1:] if args.program[:1] == ["--"] else args.program
    if not words:
        raise InvalidArgumentError("no program: hpcaccum sbatch [options] -- train ...")
    command, *options = words[1:] if words[0] == "hpcaccum" and words[1:] else words
    if args.sweep and command != "bench":
        raise InvalidArgumentError("--sweep needs a benchmark, such as bench step")
    if command != "bench" and _SHORT.fullmatch(args.time or ""):
        raise InvalidArgumentError(
            "--time must be at least 4 minutes: the ranks stop 2 minutes before its end"
        )
    args.nodes = max(args.sweep, default=args.nodes)
    if command == "train":
        text = _training(args, options)
    elif command == "bench":
        text = _benchmark(args, options)
    else:
        text = _filled("program", args, words=words)
    return functools.partial(print, text, end="")


def _training(args: argparse.Namespace, words: list[str]) -> str:
    # The script adds --save.
    found = _parsed("train", train_options.add_arguments, ["--save", ".", *words])
    if found.log:
        raise InvalidArgumentError(
            "train --log cannot be used: the script writes a log for each start"
        )
    train_options.resolve(found, args.nodes * args.ranks_per_node)
    return _filled("gpu" if found.device == "cuda" else "train", args, words=words)


def _benchmark(args: argparse.Namespace, words: list[str]) -> str:
    found = _parsed("bench", bench_options.add_arguments, words)
    if not needs_mpi(found):
        raise InvalidArgumentError(
            f"bench {found.benchmark} needs no job: run it directly"
        )
    if found.json:
        raise InvalidArgumentError("bench --json cannot be used: the script sets it")
    if len(args.sweep) > 1 and (found.csv or found.plot):
        raise InvalidArgumentError(
            "bench --csv, --plot: with --sweep, several runs would write that file"
        )
    if found.benchmark == bench_options.WIRE and min(args.sweep or [args.nodes]) == 1:
        raise InvalidArgumentError("bench wire needs at least 2 nodes")
    nodes = {"counts": map(str, sorted(args.sweep))} if args.sweep else {}
    return _filled("bench", args, words=words, **nodes)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        if message.startswith("unrecognized arguments"):
            message += "; options of hpcaccum sbatch come before --"
        raise InvalidArgumentError(f"{self.prog}: {message}")


def _parsed(
    program: str, add: Callable[[argparse.ArgumentParser], None], words: list[str]
) -> argparse.Namespace:
    """Check options as the program will do when it starts, maybe days later."""
    parser = _Parser(prog=program)
    add(parser)
    return parser.parse_args(words)


def _filled(name: str, args: argparse.Namespace, **arrays: Iterable[str]) -> str:
    """Return a script with the options of the job and its arrays."""
    text = (shipped("slurm") / f"{name}.sbatch").read_text()
    given = {each: getattr(args, option) for option, each in _NAMES.items()}
    options = [f"--{each}={value}" for each, value in given.items() if value]
    for option in (*options, *args.sbatch):
        text = _with_option(text, option)
    text = _with_value(text, "launcher", args.launcher)
    # Before `set -u`, as scripts of modules use variables that are not set.
    setup = "".join(f"{each}\n" for each in args.setup)
    text = text.replace("\nlauncher=", f"\n{setup}launcher=", 1)
    for variable, words in arrays.items():
        text = _with_value(text, variable, f"({shlex.join(words)})")
    return text


def _with_option(text: str, option: str) -> str:
    """Return a script with an option of sbatch, instead of one with this name."""
    name, equals, value = option.partition("=")
    line = f"#SBATCH {name}{equals}{shlex.quote(value) if value else ''}"
    pattern = rf"(?m)^#SBATCH {re.escape(name)}(=.*)?$"
    if re.search(pattern, text):
        return re.sub(pattern, lambda _: line, text)
    last = r"(?m)^#SBATCH .*\n(?!#SBATCH)"
    return re.sub(last, lambda found: f"{found[0]}{line}\n", text)


def _with_value(text: str, variable: str, value: str) -> str:
    """Return a script with the value of a variable, which has a line of its own."""
    return re.sub(rf"(?m)^{variable}=.*$", lambda _: f"{variable}={value}", text)


def _like(pattern: str, what: str) -> Callable[[str], str]:
    """Return the type of an option that has a pattern."""

    def checked(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise argparse.ArgumentTypeError(f"must {what}, got {text!r}")
        return text

    return checked
