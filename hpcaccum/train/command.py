"""From the command line to tables: the steps of ``hpcaccum train``."""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import asdict
from typing import TYPE_CHECKING

from hpcaccum import Group, InvalidArgumentError
from hpcaccum.device import use_device
from hpcaccum.output_files import check_apart, check_writable, ending_the_job
from hpcaccum.train.data import MISSING, load
from hpcaccum.train.log import Log, circumstances
from hpcaccum.train.loop import Run
from hpcaccum.train.options import Options, resolve
from hpcaccum.train.report import Bar, console, describe, tables

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from rich.console import Console

    from hpcaccum.train.data import Dataset
    from hpcaccum.train.records import Record, Result


def prepare(args: argparse.Namespace) -> Callable[[], None]:
    """Check and load everything; return what is then to be done. Collective.

    What can be found wrong is found here, not after an hour of training.

    Raises:
        InvalidArgumentError, DisagreementError: On every rank.
    """
    group = Group.of()
    resolved: list[Options] = []
    logs: list[Log] = []

    def options_facts() -> dict[str, object]:
        resolved.append(resolve(args, group.size))
        _check_files(resolved[0])
        return asdict(resolved[0])

    def open_files() -> dict[str, object]:
        if group.rank == resolved[0].speaker:
            _check_picture(resolved[0])
            logs.append(Log(resolved[0].log))
        return {}

    def device_facts() -> dict[str, object]:
        if resolved[0].device == "cuda":
            use_device(group.node.rank)
        return {}

    group.agree("options", options_facts)
    group.agree("--device", device_facts)
    data = load(resolved[0].data, group)
    group.agree("output", open_files)
    log = logs[0] if logs else Log(None)
    return functools.partial(_train, resolved[0], data, group, log)


def _check_files(options: Options) -> None:
    outputs = {"--log": options.log, "--plot": options.plot}
    check_apart(outputs, {"--data": options.data})


def _check_picture(options: Options) -> None:
    if options.plot is None:
        return
    if importlib.util.find_spec("matplotlib") is None:
        raise InvalidArgumentError(
            MISSING.format("matplotlib, which draws the picture,")
            + ", or do without: --no-plot"
        )
    check_writable("--plot", options.plot)


def _train(options: Options, data: Dataset, group: Group, log: Log) -> None:
    """Train with each strategy, then show what came out. Collective."""
    facts = circumstances(options, data, group)
    log.write("start", facts)
    out = console(speaks=group.rank == options.speaker)
    title = describe(facts, options)
    out.print(title, soft_wrap=True)
    results = [
        _run(strategy, options, data, group, log, out)
        for strategy in options.strategies
    ]
    log.close()
    if group.rank == options.speaker:
        for table in tables(results, options):
            out.print(table)
        if options.plot:
            from hpcaccum.train.plot import draw

            with ending_the_job("--plot", options.plot):
                draw(results, title, options.plot)
            out.print(f"picture: {options.plot}", soft_wrap=True)


def _run(
    strategy: str,
    options: Options,
    data: Dataset,
    group: Group,
    log: Log,
    out: Console,
) -> Result:
    bar = Bar(out, strategy, options.epochs)
    shown = set()

    def show(record: Record) -> None:
        shown.add(record)
        log.record(record)
        bar.show(record)

    result = Run(strategy, options, data, group, show)()
    bar.stop()
    # What was seen of the models of other shard groups.
    for record in result.records:
        if record not in shown:
            log.record(record)
    log.result(result)
    return result
