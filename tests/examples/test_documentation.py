"""The programs of docs/ that use an adapter run as printed."""

from __future__ import annotations

import pytest

from ..system.test_documentation import OF_ADAPTERS, PROGRAMS


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("name", sorted(OF_ADAPTERS))
def test_program_runs_as_printed(mpirun, tmp_path, name, ranks):
    path = tmp_path / "program.py"
    path.write_text(PROGRAMS[name])

    result = mpirun(ranks, path, env={"HPCACCUM_TIMEOUT": "60"}, cwd=tmp_path)

    assert result.returncode == 0, result.stdout
