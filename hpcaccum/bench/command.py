"""``hpcaccum bench``: from the command line to tables."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from hpcaccum import Group, InvalidArgumentError, device
from hpcaccum.bench import report, scaling, torch_step, wire
from hpcaccum.bench.compare import comparison
from hpcaccum.bench.device_case import describe_device, device_facts
from hpcaccum.bench.links import Links, describe_links
from hpcaccum.bench.measure import Conditions, Measurement, Row, rows
from hpcaccum.bench.options import Options, case_of, check_picture, resolve
from hpcaccum.bench.references import Gloo, check_usable
from hpcaccum.bench.row_files import RowFiles
from hpcaccum.files import (
    check_apart,
    check_new,
    check_writable,
    ending_the_job,
)
from hpcaccum.machine import circumstances, describe, place_and_date

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable
    from pathlib import Path

    from hpcaccum.bench.measure import Case

# Options that name a file to write; a comparison has only a picture.
_OUTPUTS = ("json", "csv", "plot")
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
    group, options = Group.of(), resolve(args)

    def open_files() -> RowFiles | None:
        if options.gloo:
            check_usable("bench torch" if options.with_torch else "--against gloo")
        if options.on_device:
            device.use_device(group.node.rank)
        if options.on_wire and group.single_node:
            raise InvalidArgumentError(_ONE_NODE)
        if group.rank != 0:
            return None
        _check_outputs(args, {})
        return RowFiles(options.json, options.csv)

    group.agree("options", lambda: asdict(options))
    files = group.agree("hpcaccum bench", open_files, facts=lambda _: {})
    return Bench(group, options, files)


def _check_outputs(args: argparse.Namespace, inputs: dict[str, Path]) -> None:
    """Raise InvalidArgumentError if a file of the call cannot or must not be written.

    Nothing is created or changed.
    """
    outputs = {f"--{each}": getattr(args, each, None) for each in _OUTPUTS}
    check_apart(outputs, inputs)
    if not args.force:
        check_new(outputs)
    check_picture(args.plot)
    for name, path in outputs.items():
        if path is not None:
            check_writable(name, path)


class Bench:
    """All benchmarks of one call.

    Args:
        group: The ranks.
        options: The same on all.
        files: What rank 0 writes; None on the others.
    """

    def __init__(self, group: Group, options: Options, files: RowFiles | None) -> None:
        self._group, self._options, self._files = group, options, files
        self._facts: dict[str, Any] = {}
        self._columns = self._choose_columns()

    def _choose_columns(self) -> report.Columns:
        if self._options.on_device:
            return report.DEVICE
        if self._options.on_wire:
            return wire.COLUMNS
        if self._options.with_torch:
            return torch_step.COLUMNS
        return report.HOST if self._group.single_node else report.BETWEEN_NODES

    def __call__(self) -> int:
        """Measure and write; return the exit status. Collective."""
        options, group = self._options, self._group
        self._facts = circumstances(group)
        title = describe(self._facts)
        if options.on_device:
            self._facts.update(device_facts())
            title += f"\n{describe_device(self._facts)}"
        links = Links(group) if options.on_wire else None
        if links:
            self._facts["links"] = describe_links(links)
            title += f"\n{self._facts['links']}"
        self._print(f"{title}\n{self._columns.legend}\n{_ROWS}")
        gloo = Gloo(group) if options.gloo else None
        conditions = Conditions(options.seconds, gloo, links)
        measured = [
            row for name in options.benchmarks for row in self._run(name, conditions)
        ]
        if gloo:
            gloo.free()
        if self._files:
            self._files.close()
        if options.plot and group.rank == 0 and measured:
            from hpcaccum.bench.plot import draw

            with ending_the_job("--plot", options.plot):
                draw(measured, f"{title}\n{place_and_date(self._facts)}", options.plot)
            self._print(f"\npicture: {options.plot}")
        return 0

    def _print(self, text: str) -> None:
        if self._group.rank == 0:
            print(text, flush=True)

    def _run(self, name: str, conditions: Conditions) -> list[Row]:
        self._print(report.head(name, self._columns))
        kind, measured = case_of(name), []
        for nbytes in self._options.sizes_of(name):
            what = f"{name} {report.size_text(nbytes)}"
            reason = self._obstacle(kind, nbytes)
            if reason:
                self._print(f"{report.size_text(nbytes):>7} skipped: {reason}")
                continue
            found = self._measure(name, what, nbytes, conditions)
            measured += found
            self._show(found)
        return measured

    def _obstacle(self, case: type[Case], nbytes: int) -> str | None:
        """Return why this size cannot be measured; None if it can. Collective."""
        if self._group.size < case.least_ranks:
            return f"needs {case.least_ranks} ranks"
        missing: str | None = case.memory.missing(self._group, nbytes)
        return missing

    def _measure(
        self, name: str, what: str, nbytes: int, conditions: Conditions
    ) -> list[Row]:
        case = case_of(name)(self._group, nbytes, conditions)
        times = Measurement(self._group, what, case, conditions.seconds)()
        found = rows(name, nbytes, self._group.size, case.kinds, times)
        case.free()
        return found

    def _show(self, found: list[Row]) -> None:
        for line in report.lines(found, self._columns):
            self._print(line)
        if self._files:
            for row in found:
                self._files.write(row, self._facts)
