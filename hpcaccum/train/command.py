"""The steps of ``hpcaccum train``, from the command line to the tables."""

from __future__ import annotations

import contextlib
import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpcaccum import Group, InvalidArgumentError, span, trace
from hpcaccum.device import use_device
from hpcaccum.files import check_apart, check_writable, ending_the_job
from hpcaccum.machine import place_and_date
from hpcaccum.optimizers import check_nodes
from hpcaccum.train import saving
from hpcaccum.train.data import MISSING, load
from hpcaccum.train.log import Log, circumstances
from hpcaccum.train.loop import Run
from hpcaccum.train.model import widths
from hpcaccum.train.options import Options, resolve
from hpcaccum.train.report import Progress, describe, saved, tables
from hpcaccum.train.stopping import STOPPED, Requests

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

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
    requests = Requests(options.time_limit, group.lost)
    requests.listen_early()
    if options.device == "cuda":
        group.agree("--device", lambda: use_device(group.node.rank), _nothing)
    data = load(options.data, group)
    expected = saving.facts(options, widths(options, data))
    found = group.agree(
        "checkpoints", lambda: saving.find(options, group.rank, expected), _nothing
    )
    # The rank that writes the log may have no model.
    continues = any(group.allgather(found is not None, "checkpoints"))
    # Last, as a log is emptied.
    log = group.agree(
        "output", lambda: _open_files(options, group, continues), _nothing
    )
    return _Job(options, data, group, requests, found, log).train


def _nothing(_: object) -> dict[str, object]:
    """Compare nothing between ranks."""
    return {}


def _options(args: argparse.Namespace, group: Group) -> Options:
    options = resolve(args, group.size)
    outputs = {"--log": options.log, "--plot": options.plot, "--trace": options.trace}
    check_apart(outputs, {"--data": options.data})
    return options


def _open_files(options: Options, group: Group, continues: bool) -> Log:
    """Open the log, which only the reporting rank writes; check other outputs."""
    if group.rank == 0 and options.trace is not None:
        check_writable("--trace", options.trace)
    reports = group.rank == options.reporter
    if reports and options.plot is not None:
        if importlib.util.find_spec("matplotlib") is None:
            raise InvalidArgumentError(
                MISSING.format("matplotlib, which draws the picture,")
                + ", or use --no-plot"
            )
        check_writable("--plot", options.plot)
    path = options.log if reports else None
    # `hpcaccum run` starts a training again with the same options.
    return Log("--log", path, append=continues)


@dataclass
class _Job:
    """A training on all ranks, and this rank's files."""

    options: Options
    data: Dataset
    group: Group
    requests: Requests
    found: Any
    log: Log

    def train(self) -> int:
        """Train with each strategy, show the results, return the status. Collective."""
        facts = circumstances(self.options, self.data, self.group)
        self.log.start(facts)
        title = describe(facts, self.options)
        self._say(title)
        with contextlib.ExitStack() as tracing:
            if self.options.trace is not None:
                tracing.enter_context(trace(self.options.trace, self.group))
            results = self._train_all()
            with ending_the_job("--trace", self.options.trace):
                tracing.close()
        self.log.close()
        diverged = [result.strategy for result in results if result.diverged]
        if self.group.rank == self.options.reporter:
            if diverged or results[-1].stopped != STOPPED:
                saving.queue_again(False)
            else:
                saving.end_as_planned()
            self._report(results, f"{title}\n{place_and_date(facts)}")
        if diverged:
            # A rank that exits ends the job, maybe before the picture is drawn.
            self.group.allgather(None, "the report")
            raise SystemExit(
                f"the loss is not finite ({', '.join(diverged)}): try a smaller --rate"
            )
        return results[-1].stopped

    def _say(self, line: str) -> None:
        if self.group.rank == self.options.reporter:
            print(line, flush=True)

    def _train_all(self) -> list[Result]:
        """Train with each strategy, until a request to stop. Collective."""
        results: list[Result] = []
        with self.requests.listening():
            for strategy in self.options.strategies:
                with span(strategy):
                    results.append(self._train_with(strategy))
                if results[-1].stopped:
                    break
        return results

    def _train_with(self, strategy: str) -> Result:
        progress = Progress(self._say, strategy, self.options.epochs)
        shown = set()

        def show(record: Record) -> None:
            shown.add(record)
            self.log.record(record)
            progress.show(record)

        result = Run(
            strategy,
            self.options,
            self.data,
            self.group,
            show,
            self.requests,
            self.found,
        )()
        # Records of other shard groups' models, made on other ranks.
        for record in result.records:
            if record not in shown:
                self.log.record(record)
        self.log.result(result)
        return result

    def _report(self, results: list[Result], title: str) -> None:
        """Print the tables and draw the picture."""
        for line in tables(results, self.options):
            self._say(line)
        if self.options.save or results[-1].stopped:
            self._say(saved(results[-1], self.options))
        if self.options.plot:
            from hpcaccum.train.plot import draw

            with ending_the_job("--plot", self.options.plot):
                draw(results, title, self.options.plot)
            self._say(f"picture: {self.options.plot}")
