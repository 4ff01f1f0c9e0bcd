"""The programs of docs/ that use an adapter run as printed."""

from __future__ import annotations

import pytest

from ..system.test_documentation import OF_ADAPTERS, PROGRAMS


# On 2 ranks only: each takes seconds to load these libraries.
@pytest.mark.parametrize("name", sorted(OF_ADAPTERS))
def test_program_runs_as_printed(mpirun, tmp_path, name):
    path = tmp_path / "program.py"
    path.write_text(PROGRAMS[name])

    result = mpirun(2, path, env={"HPCACCUM_TIMEOUT": "60"}, cwd=tmp_path)

    assert result.returncode == 0, result.stdout
