"""The programs in the README run as they are printed."""

from __future__ import annotations

import os
import re

import pytest

from .conftest import REPOSITORY

README = (REPOSITORY / "README.md").read_text()
PROGRAMS = re.findall(
    r"\*\*(\w+)\*\*(?:(?!```).)*\n```python\n(.*?)```", README, re.DOTALL
)
[ON_A_GPU] = re.findall(r"\n## On a GPU\n.*?\n```python\n(.*?)```", README, re.DOTALL)


def test_there_is_a_program_for_each_system():
    assert [name for name, _ in PROGRAMS] == [
        "CrossShardOptimizer",
        "SyncReplicasOptimizer",
        "DropStaleGradientOptimizer",
        "AGNOptimizer",
        "ConditionalAccumulator",
        "Reducer",
    ]


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize(("name", "program"), PROGRAMS, ids=[n for n, _ in PROGRAMS])
def test_program_runs_as_printed(mpirun, tmp_path, name, program, ranks):
    path = tmp_path / f"{name}.py"
    path.write_text(program)

    result = mpirun(ranks, path, env={"HPCACCUM_TIMEOUT": "20"})

    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("ranks", [1, 3])
def test_program_for_a_gpu_runs_as_printed(mpirun, tmp_path, simulator, ranks):
    path = tmp_path / "gpu.py"
    path.write_text(ON_A_GPU)
    paths = os.pathsep.join([str(REPOSITORY), simulator])

    result = mpirun(ranks, path, env={"HPCACCUM_TIMEOUT": "20", "PYTHONPATH": paths})

    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize(("name", "program"), PROGRAMS, ids=[n for n, _ in PROGRAMS])
def test_program_is_short(name, program):
    code = [line for line in program.splitlines() if line.strip()]
    assert len(code) - sum(line.startswith(("import", "from")) for line in code) <= 15
