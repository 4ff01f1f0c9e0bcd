"""The tests of the kernels again, with checks that see what results do not show."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
KERNELS = ["accumulate", "multi_tensor", "finish", "sparse", "update"]
# Under the race check, which is slow and sees as much in smaller tests.
SMALL = "(f32 or f16) and not (9000 or more_blocks or any_number or same_bits)"


def begin_again(checks, *options, **environment):
    files = [str(HERE / f"test_{name}.py") for name in KERNELS]
    command = [sys.executable, "-m", "pytest", "-q", "-x", *files]
    env = os.environ | {"CPU_CUDA_CHECKS": checks} | environment
    return subprocess.Popen(
        [*command, *options],
        env=env,
        cwd=HERE.parents[1],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def end(process):
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    assert " passed" in output


@pytest.fixture(scope="module")
def race_check():
    """Begins beside the other check."""
    with begin_again("race", "-k", SMALL) as process:
        yield process
        process.kill()


def test_no_kernel_touches_memory_that_is_not_its_own(race_check):
    """Nor does what the language leaves undefined, such as a misaligned vector."""
    command = ["g++", "-print-file-name=libasan.so"]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    library = found.stdout.strip()
    if not Path(library).is_absolute():
        pytest.skip("g++ has no address sanitizer")
    # NumPy's memory must be the sanitizer's; Python never frees all of its own.
    options = {"ASAN_OPTIONS": "detect_leaks=0", "PYTHONMALLOC": "malloc"}
    end(begin_again("address", LD_PRELOAD=library, **options))


def test_no_two_threads_race(race_check):
    end(race_check)
