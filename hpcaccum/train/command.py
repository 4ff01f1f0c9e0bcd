"""The steps of ``hpcaccum train``, from the command line to the tables."""

from __future__ import annotations

import argparse
import contextlib
import functools
from collections.abc import Callable
from typing import Any

from hpcaccum import Group, group_of, span, trace
from hpcaccum.device import device_name, use_device
from hpcaccum.errors import RESTART
from hpcaccum.files import JsonLines, check_writable, ending_the_job
from hpcaccum.machine import circumstances, hosts_and_date
from hpcaccum.plots import check_picture
from hpcaccum.server import check_nodes
from hpcaccum.stopping import Stopping, ask_restart
from hpcaccum.train import plot
from hpcaccum.train.data import Dataset, load
from hpcaccum.train.loop import Run
from hpcaccum.train.options import Options, resolve
from hpcaccum.train.report import Progress, Record, Result, describe, saved, tables
from hpcaccum.train.saving import Saver


def prepare(args: argparse.Namespace) -> Callable[[], int]:
    """Check the options and load the data; return the training. Collective.

    All errors that can be found before the training are found here.
    """
    group = group_of()
    options = group.agree("options", lambda: resolve(args, group.size))
    if options.servers != "auto":
        check_nodes(options.servers, group)
    stop = Stopping(group, time_limit=options.time_limit)

    def check(what: str, call: Callable[[], Any]) -> Any:
        return group.agree(what, call, lambda _: {})

    if options.device == "cuda":
        check("--device", lambda: use_device(group.node.rank))
    data = load(options.data, group)
    saver = check("checkpoints", lambda: Saver(options, group.rank, data))
    # Last, as a log is emptied.
    log = check("output", lambda: _open_files(options, group.rank))
    return functools.partial(_train, options, data, group, stop, saver, log)


def _open_files(options: Options, rank: int) -> JsonLines:
    """Open the log, which only the reporting rank writes; check other outputs."""
    if rank == 0:
        check_writable("--trace", options.trace)
    if rank != options.reporter:
        return JsonLines("--log", None)
    check_picture(options.plot, "pip install scikit-learn matplotlib, or --no-plot")
    # `hpcaccum run` starts a training again with the same options.
    return JsonLines("--log", options.log, append=options.resume)


def _train(
    options: Options,
    data: Dataset,
    group: Group,
    stop: Stopping,
    saver: Saver,
    log: JsonLines,
) -> int:
    """Train with each strategy, show the results, return the status. Collective."""
    facts = {
        **circumstances(group),
        "device": device_name() if options.device == "cuda" else None,
        "data": {
            "name": data.name,
            "train": len(data.y),
            "test": len(data.y_test),
            "features": data.x.shape[1],
            "classes": data.classes,
        },
        "options": vars(options),
    }
    log.write({"event": "start", **facts})
    title = describe(facts, options)
    results: list[Result] = []

    def say(line: str) -> None:
        if group.rank == options.reporter:
            print(line, flush=True)

    def show(progress: Progress, record: Record) -> None:
        log.write({"event": "look", **record.facts()})
        progress.show(record)

    say(title)
    with contextlib.ExitStack() as tracing:
        if options.trace is not None:
            tracing.enter_context(trace(options.trace, group))
        with stop:
            for strategy in options.strategies:
                progress = Progress(say, strategy, options.epochs)
                shown = functools.partial(show, progress)
                with span(strategy):
                    # Each strategy begins at step 0; the steps of `stop` go on.
                    earlier = sum(result.updates for result in results)
                    run = Run(
                        strategy, options, data, group, shown, stop, saver, earlier
                    )
                    results.append(run())
                log.write({"event": "result", **results[-1].facts()})
                if results[-1].stopped:
                    break
        with ending_the_job("--trace", options.trace):
            tracing.close()
    log.close()
    return _report(results, options, group, title, hosts_and_date(facts), say)


def _report(
    results: list[Result],
    options: Options,
    group: Group,
    title: str,
    where: str,
    say: Callable[[str], None],
) -> int:
    """Show the results of all strategies, return the status. Collective."""
    stopped = results[-1].stopped
    diverged = [result.strategy for result in results if result.diverged]
    if group.rank == options.reporter:
        if diverged or stopped != RESTART:
            ask_restart(None)
        elif options.save and not group.lost:
            # After a loss, Open MPI's mpiexec may have asked, which ends the job.
            ask_restart("")
        for line in tables(results, options):
            say(line)
        if options.save or stopped:
            say(saved(results[-1], options))
        if options.plot:
            with ending_the_job("--plot", options.plot):
                plot.draw(results, f"{title}\n{where}", options.plot)
            say(f"picture: {options.plot}")
    if diverged:
        # A rank that exits ends the job, maybe before the picture is drawn.
        group.allgather(None, "the report")
        raise SystemExit(
            f"the loss is not finite ({', '.join(diverged)}): try a smaller --rate"
        )
    return stopped
