"""The steps of ``hpcaccum train``, from the command line to the tables."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from typing import TYPE_CHECKING, Any

from hpcaccum import Group, InvalidArgumentError, span, trace
from hpcaccum.device import use_device
from hpcaccum.files import (
    check_apart,
    check_writable,
    ending_the_job,
)
from hpcaccum.machine import place_and_date
from hpcaccum.optimizers import check_nodes
from hpcaccum.train import saving
from hpcaccum.train.data import MISSING, load
from hpcaccum.train.log import Log, circumstances
from hpcaccum.train.loop import Run
from hpcaccum.train.model import check_memory, widths
from hpcaccum.train.options import Options, resolve
from hpcaccum.train.report import Progress, describe, saved, tables
from hpcaccum.train.stopping import STOPPED, Requests

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from hpcaccum.train.data import Dataset
    from hpcaccum.train.records import Record, Result


def prepare(args: argparse.Namespace) -> Callable[[], int]:
    """Check the options and load the data; return the training. Collective.

    All errors that can be found before the training are found here.
    """
    group = Group.of()
    options = group.agree("options", lambda: _options(args, group))
    if not isinstance(options.servers, str):
        check_nodes(options.servers, group)
    requests = Requests(options.time_limit)
    requests.listen_early()
    group.agree("--device", lambda: _use_device(options, group), _nothing)
    data = load(options.data, group)
    sizes = widths(options, data)
    ranks, batch = group.node.size, options.batch
    group.agree("memory", lambda: check_memory(sizes, batch, ranks), _nothing)
    expected = saving.facts(options, sizes)
    found = group.agree(
        "checkpoints", lambda: saving.find(options, group.rank, expected), _nothing
    )
    # Last, as a log is emptied.
    log = group.agree("output", lambda: _open_files(options, group), _nothing)
    return functools.partial(_train, options, data, group, requests, found, log)


def _nothing(_: object) -> dict[str, object]:
    """Compare nothing between ranks."""
    return {}


def _options(args: argparse.Namespace, group: Group) -> Options:
    options = resolve(args, group.size)
    outputs = {
        "--log": options.log,
        "--plot": options.plot,
        "--trace": options.trace,
    }
    check_apart(outputs, {"--data": options.data})
    return options


def _use_device(options: Options, group: Group) -> None:
    if options.device == "cuda":
        use_device(group.node.rank)


def _open_files(options: Options, group: Group) -> Log:
    """Open the log, which only the reporting rank writes; check other outputs."""
    if group.rank == 0 and options.trace is not None:
        check_writable("--trace", options.trace)
    reports = group.rank == options.reporter
    if reports and options.plot is not None:
        _check_plot(options.plot)
    return Log(options.log if reports else None)


def _check_plot(path: Path) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise InvalidArgumentError(
            MISSING.format("matplotlib, which draws the picture,")
            + ", or use --no-plot"
        )
    check_writable("--plot", path)


def _train(
    options: Options,
    data: Dataset,
    group: Group,
    requests: Requests,
    found: Any,
    log: Log,
) -> int:
    """Train with each strategy, show the results, return the status. Collective."""
    facts = circumstances(options, data, group)
    log.write("start", facts)
    title = describe(facts, options)
    say = _say if group.rank == options.reporter else _be_quiet
    say(title)
    with _traced(options, group):
        results = _train_all(options, data, group, requests, found, log, say)
        log.close()
        diverged = [result.strategy for result in results if result.diverged]
        if group.rank == options.reporter:
            if diverged or results[-1].stopped != STOPPED:
                saving.queue_again(False)
            _report(results, options, f"{title}\n{place_and_date(facts)}")
    if diverged:
        # A rank that exits ends the job, maybe before the picture is drawn.
        group.allgather(None, "the report")
        raise SystemExit(
            f"the loss is not finite ({', '.join(diverged)}): try a smaller --rate"
        )
    return results[-1].stopped


@contextlib.contextmanager
def _traced(options: Options, group: Group) -> Iterator[None]:
    """Trace the block, if a trace is wanted. Collective."""
    with contextlib.ExitStack() as tracing:
        if options.trace is not None:
            tracing.enter_context(trace(options.trace, group))
        yield
        with ending_the_job("--trace", options.trace):
            tracing.close()


def _train_all(
    options: Options,
    data: Dataset,
    group: Group,
    requests: Requests,
    found: Any,
    log: Log,
    say: Callable[[str], None],
) -> list[Result]:
    """Train with each strategy, until a request to stop. Collective."""
    results: list[Result] = []
    with requests.listening():
        for strategy in options.strategies:
            with span(strategy):
                run = _run(strategy, options, data, group, requests, found, log, say)
            results.append(run)
            if run.stopped:
                break
    return results


def _say(line: str) -> None:
    print(line, flush=True)


def _be_quiet(line: str) -> None:
    pass


def _report(results: list[Result], options: Options, title: str) -> None:
    """Print the tables and draw the picture."""
    for line in tables(results, options):
        _say(line)
    if options.save or results[-1].stopped:
        _say(saved(results[-1], options))
    if options.plot:
        from hpcaccum.train.plot import draw

        with ending_the_job("--plot", options.plot):
            draw(results, title, options.plot)
        _say(f"picture: {options.plot}")


def _run(
    strategy: str,
    options: Options,
    data: Dataset,
    group: Group,
    requests: Requests,
    found: Any,
    log: Log,
    say: Callable[[str], None],
) -> Result:
    progress = Progress(say, strategy, options.epochs)
    shown = set()

    def show(record: Record) -> None:
        shown.add(record)
        log.record(record)
        progress.show(record)

    run = Run(strategy, options, data, group, show, requests, found)
    result = run()
    # Records of other shard groups' models, made on other ranks.
    for record in result.records:
        if record not in shown:
            log.record(record)
    log.result(result)
    return result
