"""The tests of the kernels again, with checks that see what results do not show."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
KERNELS = ["accumulate", "multi_tensor", "finish", "sparse", "compress", "update"]
# Would take minutes under the race check, which sees as much in smaller tests.
LARGE = "9000 or more_blocks or any_number or same_bits"


def run_again(checks, *options, **environment):
    files = [str(HERE / f"test_{name}.py") for name in KERNELS]
    command = [sys.executable, "-m", "pytest", "-q", "-x", *files]
    env = os.environ | {"CPU_CUDA_CHECKS": checks} | environment
    result = subprocess.run(
        [*command, *options],
        env=env,
        cwd=HERE.parents[1],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert " passed" in result.stdout


def test_no_kernel_touches_memory_that_is_not_its_own():
    """Nor does what the language leaves undefined, such as a misaligned vector."""
    command = ["g++", "-print-file-name=libasan.so"]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    library = found.stdout.strip()
    if not Path(library).is_absolute():
        pytest.skip("g++ has no address sanitizer")
    # NumPy's memory must be the sanitizer's; Python never frees all of its own.
    options = {"ASAN_OPTIONS": "detect_leaks=0", "PYTHONMALLOC": "malloc"}
    run_again("address", LD_PRELOAD=library, **options)


def test_no_two_threads_race():
    run_again("race", "-k", f"not ({LARGE})")
