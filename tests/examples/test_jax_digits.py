"""examples/jax_digits.py trains as its first lines say."""

from __future__ import annotations

import re

from ..system.conftest import REPOSITORY


def test_it_recognizes_digits(mpirun, tmp_path):
    program = REPOSITORY / "examples" / "jax_digits.py"

    result = mpirun(3, program, env={"HPCACCUM_TIMEOUT": "60"}, cwd=tmp_path)

    assert result.returncode == 0, result.stdout
    (accuracy,) = re.findall(r"^test accuracy ([\d.]+)%$", result.stdout, re.MULTILINE)
    assert float(accuracy) > 85
