"""All ranks run every test together: mpiexec -n N python -m pytest tests/mpi.

After setup, call and teardown the ranks exchange what became of it.  A test that
fails on one rank fails on all, rank 0 prints whose traceback it is, and no rank runs
ahead into the next test.  A test that does not end in time shows the stacks of all
ranks and ends the job (`Watchdog`).
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import io
import os
import pkgutil
import shutil
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from mpi4py import MPI

import hpcaccum
from hpcaccum import group_of
from hpcaccum.mpi.job import shutdown
from tests import internals

from ..common import WAIT
from . import watchdog
from .acting import Makers, acc_fixture, make_fixture  # noqa: F401
from .expiring import impatient, in_vain_fixture  # noqa: F401
from .on_device import aware, device_library, own_card, pinned, wants_gpu  # noqa: F401
from .on_nodes import group_on_nodes, group_on_one_node, held_agent, skip_reason  # noqa: F401
from .outcome import Outcome, merge
from .reducing import NODES, Kept, maker_fixture, makers_fixture  # noqa: F401
from .support import world
from .training import copies_fixture, make_one_fixture  # noqa: F401
from .watchdog import Watchdog

# Seconds for the end of a run in which a test has failed: what that has left may never
# end. What failed is printed before.
_AFTER_FAILURES = 60.0


class Harness:
    """The state of one test run on this rank."""

    def __init__(self, config: pytest.Config) -> None:
        self.exchange = world("outcomes")
        # Of the tests not marked `own_comm`, if one has run and none has failed since.
        self.shared_comm: MPI.Intracomm | None = None
        # Whether a phase of this test has failed.
        self.failed = False
        self.kept: Kept | None = None
        world("tests")  # made here, where all ranks come by
        node = MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED)
        self.single_node = node.size == MPI.COMM_WORLD.size
        node.Free()
        self.limit = float(config.getini("mpi_time_limit"))
        # The limit of what is done at the end.
        self.last_limit = self.limit
        flag = Path(config.option.basetemp).with_name("the job ends")
        # Later on, stderr is a file of pytest's while a test runs.
        watchdog.own = self.watchdog = Watchdog(
            float(config.getini("mpi_failure_limit")),
            os.dup(2),
            self.exchange.gather(flag)[0],
            lambda: "\n".join(self.failures),
        )
        # A thread that fails ends the job, and with it what pytest has captured.
        shutdown._report = self.watchdog.say
        self.collect_errors: list[str] = []
        self.failures: list[str] = []  # on rank 0, those of all ranks

    def share(self, report: pytest.TestReport) -> None:
        """Make ``report`` the one of all ranks together. Collective."""
        outcome = Outcome.of(report)
        title = f"{report.nodeid} failed in {report.when}:\n"
        failure = title + outcome.text if outcome and report.failed else ""
        with self.watchdog.failing(failure):
            outcomes = self.exchange.gather(outcome)
        merge(report, outcomes)
        if report.failed:
            self.shared_comm, self.failed = None, True
            self.last_limit = min(self.limit, _AFTER_FAILURES)
        if report.failed and MPI.COMM_WORLD.rank == 0:
            self.failures.append(f"{title}{report.longrepr}")

    # A rank that ends alone would leave the others waiting for their limit.

    def pytest_internalerror(self, excrepr: object) -> None:
        self.watchdog.end_job(f"pytest failed:\n{excrepr}")

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        if self.watchdog.armed and exitstatus != pytest.ExitCode.USAGE_ERROR:
            self.watchdog.end_job(f"left in the middle of {self.watchdog.what}")
        if self.shared_comm is not None and self.kept is not None:
            self.watchdog.arm("freeing the shared communicator", self.limit)
            self.kept.free()
            self.shared_comm.Free()
        # The package frees what a test that failed has left, and waits without a limit.
        self.watchdog.arm("what is done at exit", self.last_limit)


HARNESS = pytest.StashKey[Harness]()
COMM = pytest.StashKey[MPI.Intracomm]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini(
        "mpi_time_limit", "seconds after which a test counts as hung", default="420"
    )
    parser.addini(
        "mpi_short",
        "bytes of vectors that ranks of other nodes send at once",
        default="8192",
    )
    parser.addini(
        "mpi_nodes",
        "made-up nodes on which tests run, such as halves,singles; all if empty",
        default="",
    )
    parser.addini(
        "mpi_failure_limit", "seconds for ranks to end a test of another", default="10"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    # Ranks that share pytest's directory remove each other's files.
    directory = tempfile.mkdtemp(prefix=f"hpcaccum-{MPI.COMM_WORLD.rank}-")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    config.option.basetemp = f"{directory}/tests"


@pytest.hookimpl(trylast=True)  # the reporter exists by then
def pytest_configure(config: pytest.Config) -> None:
    # Those of tests are short: with 0, agents ask for them as for long ones.
    short = contextlib.ExitStack()
    short.enter_context(internals.limits(short=int(config.getini("mpi_short"))))
    config.add_cleanup(short.close)
    harness = config.stash[HARNESS] = Harness(config)
    config.pluginmanager.register(harness)
    atexit.register(_finalize, harness)
    if MPI.COMM_WORLD.rank != 0:
        config.pluginmanager.unregister(name="terminalreporter")
        silent = pytest.TerminalReporter(config, io.StringIO())
        config.pluginmanager.register(silent, "terminalreporter")


def pytest_report_header(config: pytest.Config) -> str:
    name, version = MPI.get_vendor()
    library = f"{name} {'.'.join(map(str, version))}"
    limit = config.stash[HARNESS].limit
    return f"MPI: {library}, {MPI.COMM_WORLD.size} ranks, time limit {limit:g} s"


def pytest_sessionstart() -> None:
    # Hypothesis draws from the constants of the modules that happen to be loaded.
    for module in pkgutil.walk_packages(hpcaccum.__path__, "hpcaccum."):
        if not module.name.endswith("__main__"):
            with contextlib.suppress(ImportError):
                importlib.import_module(module.name)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection(session: pytest.Session) -> Generator[None, Any, Any]:
    harness = session.config.stash[HARNESS]
    harness.watchdog.arm("collecting the tests", harness.limit)
    result = yield
    found = [item.nodeid + " (skipped)" * is_skipped(item) for item in session.items]
    collected = harness.exchange.gather((harness.collect_errors, found))
    harness.watchdog.disarm()
    # Tests collect garbage, of which there is none among the modules.
    gc.collect()
    gc.freeze()
    if any(other != collected[0] for other in collected):
        pytest.exit(_difference(collected), returncode=2)
    return result


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    if report.failed:
        collector.config.stash[HARNESS].collect_errors.append(report.longreprtext)
    return report


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    chosen = _chosen_nodes(config)
    single_node = config.stash[HARNESS].single_node
    for item in items:
        # The same tests, with a simulated device otherwise.
        if wants_gpu(config) and "cp" in getattr(item, "fixturenames", ()):
            item.add_marker("gpu")
        for marker in item.iter_markers("ranks"):
            size = MPI.COMM_WORLD.size
            reason = wrong_size(size, *marker.args, **marker.kwargs)
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))
        nodes = getattr(item, "callspec", None) and item.callspec.params.get("group")
        if nodes in ("real", *NODES):
            reason = skip_reason(nodes, MPI.COMM_WORLD.size, single_node, chosen)
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))


def _chosen_nodes(config: pytest.Config) -> list[str]:
    chosen = [name for name in config.getini("mpi_nodes").split(",") if name]
    if unknown := {*chosen} - {*NODES}:
        raise pytest.UsageError(f"mpi_nodes: no {unknown}, but {', '.join(NODES)}")
    return chosen


def wrong_size(
    size: int, exactly: int | None = None, *, min: int = 1, max: int | None = None
) -> str | None:
    """Say why a test marked `ranks` cannot run on ``size`` ranks; None if it can."""
    if exactly is not None:
        min = max = exactly
    if size < min:
        return f"needs {min} ranks, has {size}"
    if max is not None and size > max:
        return f"needs at most {max} ranks, has {size}"
    return None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    harness = item.config.stash[HARNESS]
    marker = item.get_closest_marker("time_limit")
    # No limit at all is for the debugger; a marker does not restore it.
    limit = marker.args[0] if marker and harness.limit else harness.limit
    harness.watchdog.arm(item.nodeid, limit)
    # Here, where no fixture has failed on some of the ranks yet.
    own = None
    if "comm" in getattr(item, "fixturenames", ()) and not is_skipped(item):
        if item.get_closest_marker("own_comm"):
            item.stash[COMM] = own = harness.exchange.dup()
        else:
            if harness.shared_comm is None:
                harness.shared_comm = harness.exchange.dup()
                harness.kept = Kept(group_of(harness.shared_comm))
            item.stash[COMM] = harness.shared_comm
    harness.failed = False
    result = yield
    # A test that fails leaves threads that use it.
    if own is not None and not harness.failed:
        own.Free()
    harness.watchdog.disarm()
    return result


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    # The ranks have compared these marks when they collected the tests.
    if not is_skipped(item):
        item.config.stash[HARNESS].share(report)
    return report


def is_skipped(item: pytest.Item) -> bool:
    """Whether a mark skips it on all ranks, so that there is nothing to exchange."""
    return item.get_closest_marker("skip") is not None


def _difference(collected: list[tuple[list[str], list[str]]]) -> str:
    lines = ["the ranks did not collect the same tests"]
    for rank, (errors, found) in enumerate(collected):
        lines.append(f"[rank {rank}] {len(found)} tests, {len(errors)} errors")
        lines += errors
        odd = sorted(set(found) ^ set(collected[0][1])) or [
            "the same, in another order"
        ]
        lines += [f"    unlike rank 0: {odd[0]}"] if found != collected[0][1] else []
    return "\n".join(lines)


def _finalize(harness: Harness) -> None:
    # Runs after what the package registered, because that was later.
    if not MPI.Is_finalized():
        harness.watchdog.arm("MPI_Finalize", harness.last_limit)
        MPI.Finalize()
    harness.watchdog.disarm()


@pytest.fixture(scope="session")
def rank() -> int:
    return MPI.COMM_WORLD.rank


@pytest.fixture(scope="session")
def size() -> int:
    return MPI.COMM_WORLD.size


@pytest.fixture
def comm(request: pytest.FixtureRequest) -> MPI.Intracomm:
    """A communicator of all ranks; with the mark `own_comm`, one for this test."""
    return request.node.stash[COMM]


@pytest.fixture(name="keep")
def keep_fixture() -> Generator[Any, None, None]:
    """A function that keeps an object, and returns it; all are freed after the test."""
    kept: list[Any] = []

    def keep(made: Any) -> Any:
        kept.append(made)
        return made

    yield keep
    for made in kept:
        made.free()


@pytest.fixture(scope="module", autouse=True)
def _free_accumulators() -> Generator[None, None, None]:
    yield
    for each in Makers.all:
        each.free()
    # Reports and caches become ever more: tests of later modules collect garbage in a
    # fifth of the time.
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """No wait takes longer than a test may; some tests set a shorter limit."""
    monkeypatch.setenv("HPCACCUM_TIMEOUT", str(WAIT))
