"""How MPI is loaded, and what is done at the end of a program."""

from __future__ import annotations

import subprocess
import sys

import pytest
from mpi4py import MPI

from hpcaccum.mpi import runtime as mpi

from .acting import at

PROGRAMS = {
    "import": """
        import hpcaccum, sys
        acc = hpcaccum.ConditionalAccumulator
        assert "mpi4py.MPI" not in sys.modules
    """,
    "lazy": """
        import sys
        from hpcaccum.mpi import MPI
        assert "mpi4py.MPI" not in sys.modules
    """,
    "missing": """
        import sys
        sys.modules["mpi4py"] = None
        import hpcaccum as hpc
        try:
            hpc.ConditionalAccumulator("float32", (2,))
        except hpc.MPIUnavailableError as error:
            assert "pip install 'hpcaccum[mpich]'" in str(error), error
            assert "load the site's MPI module" in str(error), error
        else:
            raise SystemExit("no error")
    """,
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_package_works_without_mpi_until_it_is_used(program):
    def run():
        lines = PROGRAMS[program].strip().splitlines()
        text = "\n".join(line.removeprefix(" " * 8) for line in lines)
        return subprocess.run(
            [sys.executable, "-c", text], capture_output=True, text=True, timeout=60
        )

    done = at(0, run)
    assert done.returncode == 0, done.stderr


def test_stand_in_gives_what_mpi4py_does():
    assert mpi.MPI.COMM_WORLD is MPI.COMM_WORLD
    assert mpi.MPI.SUM is MPI.SUM
    with pytest.raises(AttributeError):
        mpi.MPI.NO_SUCH_THING  # noqa: B018


@pytest.mark.parametrize(
    ("env", "size", "right"),
    [
        ({}, 1, True),
        ({"PMI_SIZE": "4"}, 4, True),
        ({"PMI_SIZE": "4"}, 1, False),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, 1, False),
        ({"SLURM_STEP_NUM_TASKS": "3"}, 1, False),
        ({"SLURM_STEP_NUM_TASKS": "1"}, 1, True),
        # mpiexec -n 1 inside of a step of several tasks.
        ({"SLURM_STEP_NUM_TASKS": "3", "PMI_SIZE": "1"}, 1, True),
        # The whole job has several, this program was started by hand.
        ({"SLURM_NTASKS": "8"}, 1, True),
        ({"PMI_SIZE": "4", "HPCACCUM_ALLOW_SINGLETONS": "1"}, 1, True),
        ({"PMI_SIZE": ""}, 1, True),
    ],
)
def test_launcher_that_does_not_know_the_mpi_is_noticed(env, size, right):
    assert (mpi.launcher_problem(env, size, "MPICH") is None) == right


@pytest.mark.parametrize(
    ("vendor", "plugin"), [("MPICH", "pmi2"), ("Open MPI", "pmix")]
)
def test_right_line_for_slurm_is_told(vendor, plugin):
    problem = mpi.launcher_problem({"SLURM_STEP_NUM_TASKS": "3"}, 1, vendor)

    assert f"srun --mpi={plugin} " in problem
    assert "SLURM_STEP_NUM_TASKS=3 says that 3 ranks were started together" in problem
    assert vendor in problem


def test_what_is_open_is_closed_last_first(monkeypatch):
    monkeypatch.setattr(mpi, "_open", [])
    monkeypatch.setattr(mpi, "_ending", False)
    closed = []
    closers = [lambda k=k: closed.append(k) for k in range(3)]
    for close in closers:
        mpi.at_exit(close)
    mpi.forget(closers[1])
    mpi.forget(closers[1])
    mpi._close_all()
    mpi._close_all()

    assert closed == [2, 0]


def test_hook_of_somebody_else_is_left_alone(monkeypatch):
    def other(*args):
        raise AssertionError

    monkeypatch.setattr(sys, "excepthook", other)
    mpi.install_excepthook()
    assert sys.excepthook is other

    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    mpi.install_excepthook()
    assert sys.excepthook is mpi.report_and_abort

    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    mpi.install_excepthook()
    assert sys.excepthook is sys.__excepthook__
