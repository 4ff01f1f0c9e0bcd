"""The options of ``hpcaccum bench``."""

from __future__ import annotations

import argparse
import inspect
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hpcaccum import InvalidArgumentError, option_values
from hpcaccum.bench.accumulate import Accumulate
from hpcaccum.bench.allreduce import Allreduce
from hpcaccum.bench.device import DEVICE_BENCHMARKS
from hpcaccum.bench.device import __doc__ as device_help
from hpcaccum.bench.server import Server
from hpcaccum.bench.sizes import sizes
from hpcaccum.bench.step import Step
from hpcaccum.bench.torch_step import TorchStep
from hpcaccum.bench.wire import Wire

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpcaccum.bench.measure import Case

BENCHMARKS: dict[str, type[Case]] = {
    "accumulate": Accumulate,
    "allreduce": Allreduce,
    "server": Server,
    "step": Step,
}

# What `all` leaves out, as not every machine has a device or PyTorch, and not every job
# several nodes.
_ON_DEVICE, WIRE, TORCH = "device", "wire", "torch"
_CASES: dict[str, type[Case]] = {
    **BENCHMARKS,
    **DEVICE_BENCHMARKS,
    WIRE: Wire,
    TORCH: TorchStep,
}

_HELP = {
    "accumulate": "the accumulator: applies, rounds, many writers, a late rank",
    "allreduce": "the reducer, compared with the MPI library's Allreduce",
    "server": "the parameter server: pulls, publishing, whole updates",
    "step": "a training step, compared with the reducer in it",
    "all": f"one after the other: {', '.join(BENCHMARKS)}",
    WIRE: "what each strategy sends between nodes, counted at the links",
    TORCH: "a training step of PyTorch, compared with DistributedDataParallel",
    _ON_DEVICE: "kernels, accumulator and exchange on a CUDA device, vs CuPy",
    "compare": "what became slower between two --json files",
    "scaling": "how times grow with ranks and nodes, from files of several jobs",
}

_DEFAULT_SIZES = {
    **dict.fromkeys(BENCHMARKS, "4K:256M"),
    WIRE: "4K,1M,16M",
    # 1 to 50 million parameters.
    TORCH: "4M:64M,192M",
    **dict.fromkeys(DEVICE_BENCHMARKS, "1G"),
}
_SEVERAL = {"all": "4K:256M", _ON_DEVICE: "1G"}


@dataclass(frozen=True)
class Options:
    """What one call of ``hpcaccum bench`` measures; the same on all ranks.

    Attributes:
        benchmarks: Names, in order.
        sizes: In bytes; None selects the default of each benchmark.
        seconds: Approximate time for each size.
        gloo: Whether to measure torch.distributed, too.
        json, csv, plot: Files to write, or None.
        force: Whether these files may be overwritten.
    """

    benchmarks: tuple[str, ...]
    sizes: tuple[int, ...] | None
    seconds: float
    gloo: bool
    json: Path | None
    csv: Path | None
    plot: Path | None
    force: bool

    @property
    def on_device(self) -> bool:
        """Whether a device is measured instead of the host."""
        return self.benchmarks[0] in DEVICE_BENCHMARKS

    @property
    def with_torch(self) -> bool:
        """Whether PyTorch is measured."""
        return self.benchmarks == (TORCH,)

    @property
    def on_wire(self) -> bool:
        """Whether bytes between nodes are counted."""
        return self.benchmarks == (WIRE,)

    def sizes_of(self, benchmark: str) -> tuple[int, ...]:
        """Return the sizes at which to measure a benchmark."""
        return self.sizes or sizes(_DEFAULT_SIZES[benchmark])


def case_of(benchmark: str) -> type[Case]:
    """Return the class that measures a benchmark at one size."""
    return _CASES[benchmark]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the benchmarks, and the options of each, to the parser."""
    benchmarks = parser.add_subparsers(
        dest="benchmark", required=True, metavar="benchmark"
    )
    for name, text in _HELP.items():
        each = benchmarks.add_parser(
            name,
            help=text,
            description=_description(name, text),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if name == "compare":
            _add_compare(each)
        elif name == "scaling":
            _add_scaling(each)
        else:
            _add_measure(each, name)


def _description(name: str, text: str) -> str:
    """Return what the rows of a benchmark mean, as its docstring says."""
    if name == _ON_DEVICE:
        return (device_help or "").replace("``", "").strip()
    if name not in _CASES:
        return text
    text = inspect.cleandoc(_CASES[name].__doc__ or "")
    return text.partition("\nArgs:")[0].replace("``", "").strip()


def _add_measure(parser: argparse.ArgumentParser, name: str) -> None:
    parser.add_argument(
        "--sizes",
        type=sizes,
        nargs="+",
        metavar="SIZE",
        help="bytes of a gradient, such as 4K,1M, and ranges: 4K:256M is 4K, 16K and "
        "so on, 4K:256M:2 has all powers of two "
        f"({_SEVERAL.get(name) or _DEFAULT_SIZES[name]})",
    )
    parser.add_argument(
        "--seconds",
        type=option_values.positive,
        default=2.0,
        help="seconds for each size (2), less if the times settle earlier; at least "
        "three runs",
    )
    if name in ("allreduce", "all"):
        parser.add_argument(
            "--against",
            choices=("gloo",),
            help="measure torch.distributed as well",
        )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write a JSON line for each row"
    )
    parser.add_argument(
        "--csv", type=Path, metavar="FILE", help="write the same fields as a table"
    )
    _add_files(parser, "draw times over sizes")


def _add_compare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("old", type=Path, help="written by --json")
    parser.add_argument("new", type=Path, help="written by --json")
    parser.add_argument(
        "--tolerance",
        type=option_values.fraction,
        default=0.1,
        help="allowed slowdown, relative to the reference and beside the noise; more "
        "gives exit status 1 (0.1)",
    )
    _add_files(parser, "draw the ratios over sizes")


def _add_scaling(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="written by bench --json or train --log, on different numbers of ranks",
    )
    _add_files(parser, "draw the efficiency over ranks")


def _add_files(parser: argparse.ArgumentParser, text: str) -> None:
    ends = ", ".join(option_values.PICTURES)
    parser.add_argument(
        "--plot", type=option_values.picture, metavar="FILE", help=f"{text} ({ends})"
    )
    parser.add_argument(
        "--force", action="store_true", help="overwrite files that exist"
    )


def resolve(args: argparse.Namespace) -> Options:
    """Return the options of a parsed command line."""
    name = args.benchmark
    several = {"all": tuple(BENCHMARKS), _ON_DEVICE: tuple(DEVICE_BENCHMARKS)}
    return Options(
        benchmarks=several.get(name, (name,)),
        sizes=_union(args.sizes) if args.sizes else None,
        seconds=args.seconds,
        gloo=name == TORCH or getattr(args, "against", None) == "gloo",
        json=args.json,
        csv=args.csv,
        plot=args.plot,
        force=args.force,
    )


def _union(words: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Return the sizes of all words in order, each once."""
    return tuple(dict.fromkeys(itertools.chain.from_iterable(words)))


def check_picture(path: Path | None) -> None:
    """Raise InvalidArgumentError if a picture is wanted and matplotlib is missing."""
    if path is None:
        return
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise InvalidArgumentError(
            "--plot needs matplotlib, which is not installed: pip install matplotlib"
        ) from None
