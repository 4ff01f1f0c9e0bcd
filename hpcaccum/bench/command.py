"""``hpcaccum bench``: from the command line to tables."""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING

from hpcaccum import Group, InvalidArgumentError, device
from hpcaccum.bench import report, scaling, torch_step
from hpcaccum.bench.compare import comparison
from hpcaccum.bench.device import describe_device, device_facts
from hpcaccum.bench.links import Links
from hpcaccum.bench.measure import measure
from hpcaccum.bench.options import CASES, DEVICE, TORCH, WIRE, benchmarks_of, sizes_of
from hpcaccum.bench.rows import Row, RowFiles, rows
from hpcaccum.files import check_apart, check_new, check_writable, ending_the_job
from hpcaccum.machine import circumstances, describe, place_and_date

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable
    from pathlib import Path

_ONE_NODE = (
    "all ranks are on one node, and nothing crosses a wire: use hpcaccum bench step or "
    "hpcaccum bench server, or start ranks on several nodes"
)
_ROWS = "hpcaccum bench NAME --help: what the rows are"


def needs_mpi(args: argparse.Namespace) -> bool:
    """Whether this call measures, instead of reading files."""
    return args.benchmark not in ("compare", "scaling")


def prepare(args: argparse.Namespace) -> Callable[[], int | None]:
    """Check all arguments; return the command, ready to call. Collective."""
    if args.benchmark == "scaling":
        _check_outputs(args, {str(each): each for each in args.files})
        return scaling.report(args.files, args.plot)
    if args.benchmark == "compare":
        _check_outputs(args, {"old": args.old, "new": args.new})
        return comparison(args.old, args.new, args.tolerance, args.plot)
    group = Group.of()
    group.agree("options", lambda: vars(args))
    files = group.agree(
        "hpcaccum bench", lambda: _open_files(args, group), facts=lambda _: {}
    )
    return functools.partial(_run, args, group, files)


def _open_files(args: argparse.Namespace, group: Group) -> RowFiles | None:
    """Check what the benchmark needs; return what rank 0 writes."""
    if args.benchmark == TORCH:
        torch_step.check_usable("bench torch")
    if getattr(args, "against", None):
        torch_step.check_usable("--against gloo")
    if args.benchmark == DEVICE:
        device.use_device(group.node.rank)
    if args.benchmark == WIRE and group.single_node:
        raise InvalidArgumentError(_ONE_NODE)
    if group.rank != 0:
        return None
    _check_outputs(args, {})
    return RowFiles(args.json, args.csv)


def _check_outputs(args: argparse.Namespace, inputs: dict[str, Path]) -> None:
    """Raise InvalidArgumentError if a file of the call cannot or must not be written.

    Nothing is created or changed.
    """
    # A comparison has only a picture.
    names = "json", "csv", "plot"
    outputs = {f"--{each}": getattr(args, each, None) for each in names}
    check_apart(outputs, inputs)
    if not args.force:
        check_new(outputs)
    if args.plot:
        try:
            import matplotlib  # noqa: F401
        except ImportError:
            raise InvalidArgumentError(
                "--plot needs matplotlib, which is not installed: pip install "
                "matplotlib"
            ) from None
    for name, path in outputs.items():
        if path is not None:
            check_writable(name, path)


def _run(args: argparse.Namespace, group: Group, files: RowFiles | None) -> int:
    """Measure and write; return the exit status. Collective."""
    facts = circumstances(group)
    title, links = describe(facts), None
    if args.benchmark == DEVICE:
        facts.update(device_facts())
        title += f"\n{describe_device(facts)}"
    if args.benchmark == WIRE:
        links = Links(group)
        facts["links"] = links.about
        title += f"\n{links.about}"
    names = benchmarks_of(args.benchmark)
    usual = report.HOST if group.single_node else report.BETWEEN_NODES
    columns = CASES[names[0]].columns or usual
    _print(group, f"{title}\n{columns.legend}\n{_ROWS}")
    against = args.benchmark == TORCH or bool(getattr(args, "against", None))
    measured: list[Row] = []
    with torch_step.gloo(group) if against else contextlib.nullcontext():
        for name in names:
            _print(group, report.head(name, columns))
            for nbytes in sizes_of(args.sizes, name):
                found = _measure(name, nbytes, args.seconds, group, against, links)
                for line in report.lines(found, columns):
                    _print(group, line)
                for row in found:
                    if files:
                        files.write(row, facts)
                measured += found
    if files:
        files.close()
    if args.plot and group.rank == 0 and measured:
        from hpcaccum.bench.plot import draw

        with ending_the_job("--plot", args.plot):
            draw(measured, f"{title}\n{place_and_date(facts)}", args.plot)
        print(f"\npicture: {args.plot}", flush=True)
    return 0


def _print(group: Group, text: str) -> None:
    if group.rank == 0:
        print(text, flush=True)


def _measure(
    name: str,
    nbytes: int,
    seconds: float,
    group: Group,
    against: bool,
    links: Links | None,
) -> list[Row]:
    """Return the rows of one size; none, with a line that says why, if it cannot be."""
    kind, size = CASES[name], report.size_text(nbytes)
    if group.size < kind.least_ranks:
        reason: str | None = f"needs {kind.least_ranks} ranks"
    else:
        reason = kind.memory.missing(group, nbytes)
    if reason:
        _print(group, f"{size:>7} skipped: {reason}")
        return []
    case = kind(group, nbytes, against, links if links and not links.obstacle else None)
    found = rows(name, case, measure(case, f"{name} {size}", seconds))
    case.free()
    return found
