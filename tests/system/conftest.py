"""Tests of whole programs: they run once, without mpiexec, and start what they need."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from .. import simulator as simulated
from ..programs import run_program

REPOSITORY = Path(__file__).parents[2]

# A shell lets a command in the background ignore it, and so would programs of tests.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "mpirun" in getattr(item, "fixturenames", ()):
            item.add_marker("mpi")


@pytest.fixture(scope="session")
def mpi_environment() -> dict[str, str]:
    """The environment of a job: Open MPI's settings, unless set, and few threads."""
    text = (REPOSITORY / ".ci" / "env.openmpi").read_text()
    settings = dict(re.findall(r"^export (\w+)=(.*)$", text, re.MULTILINE))
    found = settings | {"OMP_NUM_THREADS": "1"} | os.environ
    return found | {"PYTHONPATH": str(REPOSITORY)}


@pytest.fixture(scope="session")
def mpiexec() -> str:
    """The launcher that belongs to the MPI of this environment."""
    path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]])
    found = shutil.which("mpiexec", path=path)
    assert found, f"no mpiexec in {path}"
    return found


@pytest.fixture
def simulator(monkeypatch: pytest.MonkeyPatch) -> str:
    """The folder from which `import cupy` is a simulated device."""
    monkeypatch.syspath_prepend(simulated.FOLDER)
    if reason := simulated.skip_reason():
        pytest.skip(reason)
    return simulated.FOLDER


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], Path]:
    """Write a program to a file of this test; return its path."""

    def write(text: str) -> Path:
        path = tmp_path / "script.py"
        path.write_text(text)
        return path

    return write


# What most programs begin with.
BEGIN = """
import os, signal, sys, time
import numpy as np
import hpcaccum as hpc
from mpi4py import MPI

comm = MPI.COMM_WORLD
rank, size = comm.rank, comm.size
"""


@pytest.fixture
def program(script: Callable[[str], Path]) -> Callable[[str], Path]:
    """Write a program that has NumPy, hpcaccum and MPI; return its path."""
    return lambda text: script(BEGIN + text)


@pytest.fixture(scope="session")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data to train with where any will do: importing scikit-learn takes seconds."""
    path = tmp_path_factory.mktemp("samples") / "own.npz"
    rng = np.random.default_rng(0)
    y = rng.choice([3, 10], 400)
    np.savez(path, x=rng.standard_normal((400, 2)) + y[:, None], y=y)
    return path


# How many samples scikit-learn's data have of each digit.
_DIGITS = [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data with the sizes of scikit-learn's digits, for as many updates."""
    path = tmp_path_factory.mktemp("digits") / "own.npz"
    rng = np.random.default_rng(0)
    y = np.repeat(np.arange(10), _DIGITS)
    np.savez(path, x=rng.standard_normal((y.size, 64)) + 4 * np.eye(10, 64)[y], y=y)
    return path


# What lets the others go on when a rank is killed: options of the launcher, and what
# starts each program (docs/failures.md says why).
SURVIVE = {
    "MPICH": (
        ["-disable-auto-cleanup"],
        ["sh", "-c", 'trap : USR1; "$@"; exit $?', "sh"],
    ),
    "Open MPI": (["--with-ft", "ulfm"], []),
}

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def mpirun(mpiexec: str, mpi_environment: dict[str, str]) -> Run:
    """Run ``mpirun(3, "script.py", ...)`` on 3 ranks with this Python.

    stdout of the result has the errors too, in the order they came.  A job that takes
    longer than ``timeout`` seconds is ended and fails the test, with what it wrote.
    So does one that ends with another ``status``, if one is given.  With ``survive``,
    the launcher lets the others go on when a rank is killed.
    """

    def run(
        ranks: int,
        *args: str | Path,
        status: int | None = None,
        timeout: float = 200,
        cwd: Path | None = None,
        env: dict[str, str] | None = None,
        program: str | Path = sys.executable,
        inside: str | None = None,
        survive: bool = False,
    ) -> subprocess.CompletedProcess[str]:
        command = [mpiexec, "-n", str(ranks), str(program), *map(str, args)]
        if survive:
            from mpi4py.MPI import get_vendor

            options, wrapper = SURVIVE[get_vendor()[0]]
            command[3:3] = wrapper
            command[1:1] = options
        if inside is not None:
            # Mounts of its own, which this command makes.
            script = f'{inside} && exec "$@"'
            command = ["unshare", "--mount", "sh", "-c", script, "sh", *command]
        result = run_program(
            command, timeout=timeout, cwd=cwd, env=mpi_environment | (env or {})
        )
        assert status in (None, result.returncode), result.stdout
        return result

    return run


# Writes what the ranks show for each command line.
REFUSED = """
import contextlib, io, json, pathlib
from mpi4py import MPI
from hpcaccum.cli import main

def attempt(words):
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
        try:
            status = main(words)
        except SystemExit as leaving:
            status = leaving.code
    assert status == 2, (words, status, shown.getvalue())
    return "".join(MPI.COMM_WORLD.allgather(shown.getvalue()))

attempts = [attempt(words) for words in {}]
if MPI.COMM_WORLD.rank == 0:
    pathlib.Path("attempts.json").write_text(json.dumps(attempts))
"""


@pytest.fixture
def refused(
    mpirun: Run, script: Callable[[str], Path], tmp_path: Path
) -> Callable[..., list[str]]:
    """Have two ranks refuse commands, each by one line; return what is shown.

    One job tries all: what takes time is to start it.
    """

    def run(*commands: Iterable[str]) -> list[str]:
        text, found = REFUSED.format([*map(list, commands)]), tmp_path / "attempts.json"
        program = script(text)
        result = mpirun(2, program, cwd=tmp_path, status=0)
        attempts: list[str] = json.loads(found.read_text())
        for shown in attempts:
            lines = shown.splitlines()
            assert sum(": error: " in line for line in lines) == 1, shown
            # How it is used, and where to read more.
            known = "hpcaccum |usage: |see hpcaccum |  "
            assert all(re.match(known, line) for line in lines), shown
        assert (result.stdout, program.read_text()) == ("", text)
        program.unlink()
        found.unlink()
        return attempts

    return run


@pytest.fixture(scope="session")
def patched(mpirun: Run) -> Run:
    """Run ``hpcaccum`` with some words on some ranks, after lines of Python in each."""

    def run(
        ranks: int, before: str, *words: str | Path, cwd: Path, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        program = cwd / "patched.py"
        program.write_text(
            f"import sys\n{before}\n"
            "from hpcaccum.cli import main\n"
            "if __name__ == '__main__':\n"
            "    sys.exit(main())\n"
        )
        return mpirun(ranks, program, *words, cwd=cwd, **options)

    return run
