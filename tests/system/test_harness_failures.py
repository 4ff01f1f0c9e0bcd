"""The harness of tests/mpi where a test fails, hangs, or differs between the ranks."""

from __future__ import annotations

import os
import re
import textwrap

import pytest

from .conftest import REPOSITORY

# How long the others may wait for a rank that has failed: usually 10 s.
SOON = ("-o", "mpi_failure_limit=3")


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


def test_what_becomes_of_a_test_on_one_rank_is_that_of_all(run_tests):
    result = run_tests("""
        def test_bad(comm):
            print("printed by", rank)
            assert rank != 1, "no luck"
        def test_next(comm):
            comm.Barrier()
        @pytest.fixture
        def half(comm):
            assert rank != 2, "no start"
            yield
            assert rank != 0, "no end"
        def test_half(half):
            comm.Barrier()  # not reached
        @pytest.fixture
        def other():
            if rank == 1:
                pytest.skip("no disk")
        def test_skipped(other, comm):
            comm.Barrier()
    """)

    assert result.returncode != 0
    assert re.search(r"\[rank 1\].*no luck", result.stdout, re.DOTALL)
    assert "printed by 1" in result.stdout
    assert re.search(r"\[rank 2\].*no start", result.stdout, re.DOTALL)
    assert re.search(r"\[rank 0\].*no end", result.stdout, re.DOTALL)
    assert "not reached" not in result.stdout
    assert "1 failed, 1 passed, 1 skipped, 2 errors" in result.stdout


def test_a_rank_that_sleeps_ends_the_job_with_all_stacks(run_tests):
    result = run_tests(
        """
        def test_first(comm):
            assert rank != 0, "failed before"
        def test_sleeper(comm):
            if rank == 2:
                time.sleep(1000)
            assert rank != 1, "failed beside"
            comm.Barrier()
        """,
        "-o",
        "mpi_time_limit=2",
    )

    assert result.returncode != 0
    for rank in range(3):
        assert f"[rank {rank}] no progress in 2 s: test_it.py::test_sleeper" in (
            result.stdout
        )
    assert re.search(r"\[rank 2\] +time.sleep\(1000\)", result.stdout)
    assert re.search(r"\[rank 0\] +comm.Barrier\(\)", result.stdout)
    assert re.search(r"\[rank 1\] .*failed beside", result.stdout)
    assert re.search(r"\[rank 0\] .*failed before", result.stdout)


@pytest.mark.parametrize(
    "call",
    [
        "comm.Barrier()",
        # Holds the interpreter lock, so that the watchdog cannot run.
        "ctypes.PyDLL(None).sleep(1000)",
    ],
)
def test_a_rank_that_fails_ends_those_that_wait_for_it(run_tests, call):
    result = run_tests(
        f"""
        import ctypes
        def test_bad(comm):
            print("printed by", rank)
            assert rank != 1, "no luck"
            {call}
        """,
        *SOON,
    )

    assert result.returncode != 0
    assert "[rank 1] no progress in 3 s: test_it.py::test_bad" in result.stdout
    assert "[rank 1] test_it.py::test_bad failed in call" in result.stdout
    assert re.search(r"\[rank 1\] E .*no luck", result.stdout)
    assert "[rank 1] printed by 1" in result.stdout
    if "sleep" not in call:
        for rank in 0, 2:
            end = f"[rank {rank}] another rank ends the job, this one is in test_it.py"
            assert f"{end}::test_bad" in result.stdout
            assert re.search(rf"\[rank {rank}\] +{re.escape(call)}", result.stdout), (
                result.stdout
            )


def test_a_rank_that_holds_the_interpreter_shows_its_stack(run_tests):
    result = run_tests(
        """
        import ctypes
        def test_bad(comm):
            if rank == 1:
                ctypes.PyDLL(None).sleep(1000)
            comm.Barrier()
        """,
        "-o",
        "mpi_time_limit=2",
    )

    assert result.returncode != 0
    assert re.search(r"Timeout \(0:00:03.5.*in test_bad", result.stdout, re.DOTALL)
    assert "[rank 0] no progress in 2 s: test_it.py::test_bad" in result.stdout


def test_a_rank_stuck_in_finalize_ends_the_job(run_tests):
    result = run_tests(
        """
        def stuck(*args):
            time.sleep(1000)
        def test_good():
            if rank == 1:
                MPI.COMM_SELF.Set_attr(MPI.Comm.Create_keyval(delete_fn=stuck), None)
        """,
        "-o",
        "mpi_time_limit=2",
    )

    assert result.returncode != 0
    assert re.search(r"\[rank 1\] +time.sleep\(1000\)", result.stdout)


def test_a_rank_that_leaves_ends_the_job(run_tests):
    result = run_tests("""
        def test_leaver(comm):
            if rank == 1:
                pytest.exit("enough")
            comm.Barrier()
    """)

    assert result.returncode != 0
    assert "[rank 1] left in the middle of test_it.py::test_leaver" in result.stdout


def test_ranks_that_collect_different_tests_are_reported(run_tests):
    result = run_tests("""
        @pytest.mark.parametrize("n", range(1 + (rank == 1)))
        def test_some(n): pass
    """)

    assert result.returncode != 0
    assert "the ranks did not collect the same tests" in result.stdout
    assert "unlike rank 0: test_it.py::test_some[1]" in result.stdout
