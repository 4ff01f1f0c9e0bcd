"""The harness of tests/mpi where a test fails, hangs, or differs between the ranks."""

from __future__ import annotations

import os
import re
import textwrap

import pytest

from .conftest import REPOSITORY


@pytest.fixture
def run_tests(mpirun, tmp_path):
    """Run the text of a test file on 3 ranks under the harness."""

    def run(text, *options):
        (tmp_path / "test_it.py").write_text(
            "import sys, time, pytest\nfrom mpi4py import MPI\n"
            "rank = MPI.COMM_WORLD.rank\n" + textwrap.dedent(text)
        )
        config = ["-c", REPOSITORY / "pyproject.toml", "--rootdir", tmp_path]
        plugins = ["-p", "tests.conftest", "-p", "tests.mpi.conftest"]
        args = ["-m", "pytest", *config, *plugins, "--color=no", *options, "test_it.py"]
        path = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
        return mpirun(3, *args, cwd=tmp_path, env={"PYTHONPATH": path})

    return run


SLOW = """
import ctypes
def test_it(comm):
    if rank == 2:
        {}
    assert rank != 1, "failed beside"
    comm.Barrier()
"""
STUCK_AT_THE_END = """
def stuck(*args):
    time.sleep(1000)
def test_it():
    if rank == 1:
        MPI.COMM_SELF.Set_attr(MPI.Comm.Create_keyval(delete_fn=stuck), None)
"""
# As hypothesis does, which looks for a smaller example.
FAILS_ALWAYS = """
from tests.mpi.watchdog import failing
def test_it(comm):
    while True:
        time.sleep(0.1)
        with failing("no luck again"):
            comm.Barrier()
"""
LEAVES = """
def test_it(comm):
    if rank == 1:
        pytest.exit("enough")
    comm.Barrier()
"""
FAILS = """
import ctypes
def test_it(comm):
    print("printed by", rank)
    assert rank != 1, "no luck"
    {}
"""
FAILED = [
    *(r"\[rank 1\] no progress in 3 s: test_it.py::test_it", r"\[rank 1\] E .*no luck"),
    r"\[rank 1\] test_it.py::test_it failed in call",
    r"\[rank 1\] printed by 1",
]
NO_PROGRESS = r"\[rank 0\] no progress in 2 s: test_it.py::test_it"
HANGS = {
    "waits for one that failed": (
        FAILS.format("comm.Barrier()"),
        [
            *FAILED,
            r"\[rank [02]\] another rank ends the job, this one is in test_it.py::test",
            *(rf"\[rank {rank}\] +comm.Barrier\(\)" for rank in (0, 2)),
        ],
    ),
    # The watchdog cannot run on the others.
    "waits with the interpreter": (
        FAILS.format("ctypes.PyDLL(None).sleep(1000)"),
        FAILED,
    ),
    "sleeps": (
        SLOW.format("time.sleep(1000)"),
        [
            *(NO_PROGRESS, r"\[rank 2\] +time.sleep\(1000\)"),
            *(r"\[rank 0\] +comm.Barrier\(\)", r"\[rank 1\] .*failed beside"),
        ],
    ),
    "holds the interpreter": (
        SLOW.format("ctypes.PyDLL(None).sleep(1000)"),
        [NO_PROGRESS, r"(?s)Timeout \(0:00:03.5.*in test_it"],
    ),
    "is stuck at the end": (STUCK_AT_THE_END, [r"\[rank 1\] +time.sleep\(1000\)"]),
    "fails always": (
        FAILS_ALWAYS,
        [r"\[rank \d\] no progress in 2 s", r"\[rank \d\] no luck again"],
    ),
    "leaves": (LEAVES, [r"\[rank 1\] left in the middle of test_it.py::test_it"]),
}


@pytest.mark.parametrize("case", HANGS)
def test_a_rank_that_does_not_get_on_ends_the_job_with_all_stacks(run_tests, case):
    text, patterns = HANGS[case]
    limit = "mpi_failure_limit=3" if "waits" in case else "mpi_time_limit=2"
    result = run_tests(text, "-o", limit)

    assert result.returncode != 0
    for pattern in patterns:
        assert re.search(pattern, result.stdout), result.stdout
