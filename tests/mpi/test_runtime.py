"""How MPI is loaded, and what happens at the end of a program."""

import copy
import os
import pickle
import subprocess
import sys

import mpi4py
import pytest
from mpi4py import MPI

import hpcaccum as hpc
from hpcaccum.mpi import Freeable, group_of
from hpcaccum.mpi.job import launcher, runtime, shutdown

pytestmark = pytest.mark.any_size

PROGRAMS = {
    "no side effects": """
        import atexit, logging, os, signal, sys, threading
        # Import these first, as they may have side effects.
        import ml_dtypes, numpy

        def state():
            return {
                "excepthook": sys.excepthook,
                "excepthook of threads": threading.excepthook,
                "callbacks at exit": atexit._ncallbacks(),
                "threads": threading.active_count(),
                "switch interval": sys.getswitchinterval(),
                "signals": [signal.getsignal(n) for n in signal.valid_signals()],
                "handlers of the log": list(logging.root.handlers),
                "environment": dict(os.environ),
                "floating-point errors": numpy.geterr(),
            }

        before = state()
        import hpcaccum
        from hpcaccum.mpi import MPI
        assert "mpi4py.MPI" not in sys.modules
        changed = [name for name, fact in state().items() if fact != before[name]]
        assert not changed, changed
        assert sys.excepthook is sys.__excepthook__
    """,
    "import below a rank": """
        import os, sys
        os.environ["PMI_SIZE"] = "2"
        import hpcaccum
        assert sys.excepthook is sys.__excepthook__
    """,
    "first use": """
        import atexit, sys
        import hpcaccum
        from mpi4py import MPI
        before, finalize = atexit._ncallbacks(), MPI.Finalize
        hpcaccum.group_of(MPI.COMM_SELF)
        assert sys.excepthook is hpcaccum.mpi.job.shutdown.report_and_abort
        assert atexit._ncallbacks() == before + 1
        assert MPI.Finalize is not finalize
        hpcaccum.group_of(MPI.COMM_WORLD)
        assert atexit._ncallbacks() == before + 1
    """,
}

# The program has taken a signal, and MPI_Abort keeps the interpreter lock.
STUCK = """
import ctypes, signal, sys, types
from hpcaccum.mpi.job import shutdown

signal.signal(signal.SIGALRM, lambda *_: None)
signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
sys.modules["mpi4py.MPI"] = types.SimpleNamespace(
    Is_initialized=lambda: True,
    Is_finalized=lambda: False,
    COMM_WORLD=types.SimpleNamespace(size=2, Abort=ctypes.PyDLL(None).sleep),
)
shutdown._ABORT = 1
shutdown.install_excepthook()
shutdown.abort_job(99)
"""


def environment_without_launcher():
    """Return the environment of a program that no launcher has started."""
    prefixes = ("PMI", "OMPI_", "PMIX", "PALS_", "SLURM_", "HYDI_", "MPI_LOCAL")
    return {k: v for k, v in os.environ.items() if not k.startswith(prefixes)}


# Programs of one process: they do not depend on the number of ranks here.
@pytest.mark.ranks(1)
@pytest.mark.parametrize("program", PROGRAMS)
def test_package_works_without_mpi_until_it_is_used(program):
    lines = PROGRAMS[program].strip().splitlines()
    text = "\n".join(line.removeprefix(" " * 8) for line in lines)
    done = subprocess.run(
        [sys.executable, "-c", text],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment_without_launcher(),
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.ranks(1)
def test_a_process_whose_abort_does_not_return_ends_alone():
    done = subprocess.run(
        [sys.executable, "-c", STUCK], capture_output=True, text=True, timeout=60
    )

    assert (done.returncode, done.stderr) == (1, "")


def test_lazy_module_has_the_attributes_of_mpi4py():
    assert runtime.MPI.COMM_WORLD is MPI.COMM_WORLD
    assert runtime.MPI.SUM is MPI.SUM
    with pytest.raises(AttributeError):
        runtime.MPI.NO_SUCH_THING  # noqa: B018


@pytest.mark.parametrize(
    ("env", "size", "right"),
    [
        ({}, 1, True),
        ({"PMI_SIZE": "4"}, 4, True),
        ({"PMI_SIZE": "4"}, 1, False),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, 1, False),
        ({"SLURM_STEP_NUM_TASKS": "3"}, 1, False),
        # mpiexec -n 1 inside of a step of several tasks.
        ({"SLURM_STEP_NUM_TASKS": "3", "PMI_SIZE": "1"}, 1, True),
        # The whole job has several, this program was started by hand.
        ({"SLURM_NTASKS": "8"}, 1, True),
        ({"PMI_SIZE": "4", "HPCACCUM_ALLOW_SINGLETONS": "1"}, 1, True),
        ({"PMI_SIZE": "\N{SUPERSCRIPT TWO}"}, 1, True),
        # mpiexec in an interactive step, and in one that starts a daemon on each node.
        ({"SLURM_STEP_NUM_TASKS": "1", "PMI_SIZE": "4"}, 1, False),
        ({"SLURM_STEP_NUM_TASKS": "1", "PALS_SIZE": "4"}, 1, False),
        ({"SLURM_STEP_NUM_TASKS": "2", "OMPI_COMM_WORLD_SIZE": "1"}, 1, True),
    ],
)
def test_launcher_that_does_not_know_the_mpi_is_noticed(env, size, right):
    assert (launcher.launcher_problem(env, size, "MPICH") is None) == right


def test_the_nearest_launcher_says_how_many_ranks_there_are():
    nearest, other = "PMI_SIZE", "OMPI_COMM_WORLD_SIZE"
    if MPI.get_vendor()[0] == "Open MPI":
        nearest, other = other, nearest
    for size in "1", "4":
        env = {nearest: size, other: "3", "SLURM_STEP_NUM_TASKS": "2"}
        assert launcher.launched_ranks(env) == int(size)
        problem = launcher.launcher_problem(env, 1, "MPICH")
        assert (problem is None) == (size == "1")


def test_excepthook_of_the_program_is_kept(monkeypatch):
    def other(*args):
        raise AssertionError

    monkeypatch.setattr(sys, "excepthook", other)
    shutdown.install_excepthook()
    assert sys.excepthook is other

    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    shutdown.install_excepthook()
    assert sys.excepthook is shutdown.report_and_abort

    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    shutdown.install_excepthook()
    assert sys.excepthook is sys.__excepthook__


@pytest.mark.parametrize(
    ("threads", "level", "advice"),
    [
        (True, "multiple", "use an MPI library that provides it"),
        (True, "funneled", "mpi4py asked for 'funneled'; unset MPI4PY_RC_THREAD_LEVEL"),
        (False, "multiple", "mpi4py asked for 'single'; unset MPI4PY_RC_THREAD_LEVEL"),
    ],
)
def test_lack_of_threads_comes_with_advice(monkeypatch, threads, level, advice):
    monkeypatch.setattr(mpi4py.rc, "threads", threads)
    monkeypatch.setattr(mpi4py.rc, "thread_level", level)
    text = runtime.lack_of_threads("a server needs")

    start = "MPI provides no MPI_THREAD_MULTIPLE, which a server needs; "
    assert text.startswith(start + advice)


# Objects that are freed once: by a call, by a ``with`` block, or at the end


class Thing(Freeable):
    """Appends its name to a list when it is freed, or raises an error."""

    def __init__(self, name, freed, group=None, error=None):
        self.name, self.list, self.error = name, freed, error
        if group is not None:
            self._register(group, group.label(name))

    def _describe(self):
        return f"thing {self.name!r}"

    def _free(self):
        if self.error is not None:
            raise self.error
        self.list.append(self.name)


@pytest.fixture
def own_list(monkeypatch):
    """Lists of open objects for this test; as if the program were not ending."""
    monkeypatch.setattr(shutdown, "_open", [])
    monkeypatch.setattr(shutdown, "_ending", False)


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, pickle.dumps])
def test_what_can_be_saved_of_it_is_in_the_message(comm, way):
    made = [
        hpc.ConditionalAccumulator("float32", (3,), comm=comm),
        hpc.CrossShardOptimizer(hpc.SGD(1.0), comm=comm),
    ]
    for each in made:
        with pytest.raises(
            TypeError, match=r"; snapshot\(\) returns what can be saved$"
        ):
            way(each)
        each.free()


@pytest.mark.own_comm
@pytest.mark.usefixtures("own_list")
def test_it_is_open_if_freeing_it_failed(comm):
    freed = []
    thing = Thing("a", freed, group_of(comm), ValueError("not yet"))
    with pytest.raises(ValueError, match="not yet"):
        thing.free()
    assert not thing.freed
    assert shutdown.count_open() == 1

    thing.error = None
    thing.free()
    assert thing.freed
    assert freed == ["a"]
    assert shutdown.count_open() == 0


@pytest.mark.own_comm
@pytest.mark.usefixtures("own_list")
def test_what_is_open_at_the_end_is_freed_last_registered_first(comm):
    group, freed = group_of(comm), []
    first, second, third = (Thing(name, freed, group) for name in "abc")
    Thing("unregistered", freed)
    second.free()
    shutdown._close_all()
    shutdown._close_all()

    assert freed == ["b", "c", "a"]
    assert first.freed
    assert third.freed
    first.free()
    assert freed == ["b", "c", "a"]
