"""The options of ``hpcaccum bench``."""

from __future__ import annotations

import argparse
import inspect
import re
from pathlib import Path

from hpcaccum import option_values
from hpcaccum.bench.accumulate import Accumulate
from hpcaccum.bench.allreduce import Allreduce
from hpcaccum.bench.device import DEVICE_BENCHMARKS
from hpcaccum.bench.device import __doc__ as device_help
from hpcaccum.bench.measure import Case
from hpcaccum.bench.step import Step
from hpcaccum.bench.torch_step import TorchStep
from hpcaccum.bench.wire import Wire
from hpcaccum.option_values import add as add_option
from hpcaccum.option_values import add_flag, positive

BENCHMARKS: dict[str, type[Case]] = {
    "accumulate": Accumulate,
    "allreduce": Allreduce,
    "step": Step,
}
# What `all` leaves out, as not every machine has a device or PyTorch, and not every job
# several nodes.
DEVICE, WIRE, TORCH, PLAN = "device", "wire", "torch", "plan"
CASES: dict[str, type[Case]] = {
    **BENCHMARKS,
    WIRE: Wire,
    TORCH: TorchStep,
    **DEVICE_BENCHMARKS,
}
_SEVERAL = {"all": tuple(BENCHMARKS), DEVICE: tuple(DEVICE_BENCHMARKS)}

# A vector is cut into 32 arrays of 4-byte numbers.
_GRAIN = 128
_UNITS = {"": 0, "K": 10, "M": 20, "G": 30}
_SIZE = "([0-9]+)([KMG]?)(?:i?B)?"


def benchmarks_of(name: str) -> tuple[str, ...]:
    """Return the benchmarks that a word of the command line stands for."""
    return _SEVERAL.get(name, (name,))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the benchmarks, and the options of each, to the parser."""
    benchmarks = parser.add_subparsers(
        dest="benchmark", required=True, metavar="benchmark"
    )

    def add(name: str, text: str, description: str | None) -> argparse.ArgumentParser:
        return benchmarks.add_parser(
            name,
            help=text,
            description=(description or text).replace("``", "").strip(),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    for name in (*BENCHMARKS, WIRE, TORCH):
        case = CASES[name]
        _add_measure(add(name, case.help, inspect.getdoc(case)), name)
    _add_measure(add("all", f"one after the other: {', '.join(BENCHMARKS)}", ""), "all")
    text = "kernels, accumulator and exchange on a CUDA device, vs CuPy"
    _add_measure(add(DEVICE, text, device_help), DEVICE)

    fitted = add(PLAN, "the costs of an exchange, for hpcaccum plan --network", "")
    add_option(fitted, "--seconds", positive, "seconds for each case (4)", 4.0, None)
    text = "write the costs, and how well they fit"
    add_option(fitted, "--json", Path, text, metavar="FILE")
    add_flag(fitted, "--force", "overwrite a file that exists")

    compare = add("compare", "what became slower between two --json files", "")
    compare.add_argument("old", type=Path, help="written by --json")
    compare.add_argument("new", type=Path, help="written by --json")
    text = "allowed slowdown, relative to the reference and beside the noise; more "
    text += "gives exit status 1 (0.1)"
    add_option(compare, "--tolerance", option_values.fraction, text, 0.1, None)
    text = "how times grow with ranks and nodes, from files of several jobs"
    scaling = add("scaling", text, "")
    text = "written by bench --json or train --log, on different numbers of ranks"
    scaling.add_argument("files", type=Path, nargs="+", metavar="FILE", help=text)
    _add_picture(scaling, "draw the efficiency over ranks")


def _add_measure(parser: argparse.ArgumentParser, name: str) -> None:
    text = "bytes of a gradient, such as 4K,1M, and ranges: 4K:256M is 4K, 16K and so "
    text += "on, 4K:256M:2 has all powers of two "
    text += f"({CASES[benchmarks_of(name)[0]].sizes})"
    parser.add_argument("--sizes", type=sizes, nargs="+", metavar="SIZE", help=text)
    text = "seconds for each size (2); at least three runs"
    add_option(parser, "--seconds", positive, text, 2.0, None)
    if name in ("allreduce", "all"):
        text = "measure torch.distributed as well"
        parser.add_argument("--against", choices=("gloo",), help=text)
    text = "write a JSON line for each row"
    add_option(parser, "--json", Path, text, metavar="FILE")
    text = "write the same fields as a table"
    add_option(parser, "--csv", Path, text, metavar="FILE")
    _add_picture(parser, "draw times over sizes")


def _add_picture(parser: argparse.ArgumentParser, text: str) -> None:
    text += f" ({', '.join(option_values.PICTURES)})"
    add_option(parser, "--plot", option_values.picture, text, metavar="FILE")
    add_flag(parser, "--force", "overwrite files that exist")


def sizes_of(words: list[list[int]] | None, benchmark: str) -> list[int]:
    """Return the sizes of all words of ``--sizes`` in order, each once."""
    chosen = words or [sizes(CASES[benchmark].sizes)]
    return list(dict.fromkeys(size for word in chosen for size in word))


def sizes(text: str) -> list[int]:
    """Return the bytes that a word such as ``1K,4K:1M:2`` stands for.

    A range ``FIRST:LAST:FACTOR`` is multiplied by the factor, 4 by default, as long as
    the last size is not exceeded.
    """
    return [size for part in text.split(",") for size in _range(part)]


def _range(text: str) -> list[int]:
    found = re.fullmatch(f"{_SIZE}(?::{_SIZE}(?::([0-9]+))?)?", text.strip(), re.I)
    if not found:
        raise argparse.ArgumentTypeError(
            "must be a number, optionally with K, M or G, or a range such as 4K:256M "
            f"or 4K:256M:2, got {text!r}"
        )
    first, unit, end, end_unit, factor = found.groups()
    size, by = int(first) << _UNITS[unit.upper()], int(factor or 4)
    last = int(end) << _UNITS[end_unit.upper()] if end else size
    if size == 0 or size % _GRAIN:
        raise argparse.ArgumentTypeError(
            f"must be a multiple of {_GRAIN} bytes, got {text!r}"
        )
    if size > last or by < 2:
        raise argparse.ArgumentTypeError(
            "must be a range from a smaller to a larger size, with a factor from 2 on, "
            f"got {text!r}"
        )
    several = [size]
    while several[-1] * by <= last:
        several.append(several[-1] * by)
    return several
