"""``hpcaccum bench``: from the command line to tables."""

from __future__ import annotations

import argparse
import contextlib
import functools
from collections.abc import Callable
from pathlib import Path

from hpcaccum import Group, InvalidArgumentError, device, group_of
from hpcaccum.bench import plan, report, scaling, torch_step
from hpcaccum.bench.compare import comparison
from hpcaccum.bench.links import Links
from hpcaccum.bench.measure import measure, rows
from hpcaccum.bench.options import (
    CASES,
    DEVICE,
    PLAN,
    TORCH,
    WIRE,
    benchmarks_of,
    sizes_of,
)
from hpcaccum.bench.plot import draw
from hpcaccum.bench.rows import Row, RowFiles
from hpcaccum.files import check_apart, check_new, check_writable, ending_the_job
from hpcaccum.machine import circumstances, describe, hosts_and_date
from hpcaccum.plots import check_picture

_ONE_NODE = (
    "all ranks are on one node, and nothing crosses a wire: use hpcaccum bench step, "
    "or start ranks on several nodes"
)
_ROWS = "hpcaccum bench NAME --help: what the rows are"


def needs_mpi(args: argparse.Namespace) -> bool:
    """Whether this call measures, instead of reading files."""
    return args.benchmark not in ("compare", "scaling")


def prepare(args: argparse.Namespace) -> Callable[[], int | None]:
    """Check all arguments; return the command, ready to call. Collective."""
    if args.benchmark == "compare":
        return comparison(args.old, args.new, args.tolerance)
    if args.benchmark == "scaling":
        _check_outputs(args, {str(each): each for each in args.files})
        return scaling.report(args.files, args.plot)
    group = group_of()
    group.agree("options", lambda: vars(args))
    if args.benchmark == PLAN:
        return plan.prepare(args, group)
    files = group.agree(
        "hpcaccum bench", lambda: _open_files(args, group), facts=lambda _: {}
    )
    return functools.partial(_run, args, group, files)


def _open_files(args: argparse.Namespace, group: Group) -> RowFiles:
    """Check what the benchmark needs; return what rank 0 writes."""
    if _uses_torch(args):
        what = "bench torch" if args.benchmark == TORCH else "--against gloo"
        torch_step.check_usable(what)
    if args.benchmark == TORCH and group.size == 1:
        raise InvalidArgumentError("bench torch needs 2 ranks")
    if args.benchmark == DEVICE:
        device.use_device(group.node.rank)
    if args.benchmark == WIRE and group.single_node:
        raise InvalidArgumentError(_ONE_NODE)
    if group.rank != 0:
        return RowFiles(None, None)
    _check_outputs(args, {})
    return RowFiles(args.json, args.csv)


def _check_outputs(args: argparse.Namespace, inputs: dict[str, Path]) -> None:
    """Raise if a file of the call cannot or must not be written; change none."""
    # If several jobs are compared, only a picture is written.
    names = "json", "csv", "plot"
    outputs = {f"--{each}": getattr(args, each, None) for each in names}
    check_apart(outputs, inputs)
    if not args.force:
        check_new(outputs)
    check_picture(args.plot)
    for name in "--json", "--csv":
        check_writable(name, outputs[name])


def _uses_torch(args: argparse.Namespace) -> bool:
    return args.benchmark == TORCH or getattr(args, "against", None) is not None


def _run(args: argparse.Namespace, group: Group, files: RowFiles) -> int:
    """Measure and write; return the exit status. Collective."""
    facts = circumstances(group)
    title, links = describe(facts), None
    if args.benchmark == DEVICE:
        facts.update(device.device_facts())
        title += f"\n{device.device_name()}; {facts['date']}"
    if args.benchmark == WIRE:
        links = Links(group)
        facts["links"] = links.about
        title += f"\n{links.about}"
    names = benchmarks_of(args.benchmark)
    columns = CASES[names[0]].columns

    def show(*lines: str) -> None:
        if group.rank == 0:
            print(*lines, sep="\n", flush=True)

    show(title, columns.legend, _ROWS)
    measured: list[Row] = []
    against = _uses_torch(args)
    with torch_step.gloo(group) if against else contextlib.nullcontext():
        for name in names:
            show(report.head(name, columns))
            for nbytes in sizes_of(args.sizes, name):
                size = report.size_text(nbytes)
                if reason := CASES[name].memory.missing(group, nbytes):
                    show(f"{size:>7} skipped: {reason}")
                    continue
                case = CASES[name](group, nbytes, against, links)
                found = rows(name, case, measure(case, f"{name} {size}", args.seconds))
                case.free()
                # Else its arrays remain beside those of the next size.
                del case
                show(*report.lines(found, columns))
                files.write(found, facts)
                measured += found
    files.close()
    if args.plot and group.rank == 0 and measured:
        with ending_the_job("--plot", args.plot):
            draw(measured, f"{title}\n{hosts_and_date(facts)}", args.plot)
        show(f"\npicture: {args.plot}")
    return 0
