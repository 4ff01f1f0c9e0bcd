"""Every kernel compiled for GPUs by NVRTC, as CuPy calls it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hpcaccum.device import kernels

pytestmark = pytest.mark.slow

ARCHITECTURES = ["80", "100"]
# The most with which 4 blocks of 256 threads are at work at once.
MOST_REGISTERS = 64

ENTRY = re.compile(r"Compiling entry function '(\w+)' for 'sm_\w+'")
STACK = re.compile(
    r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill"
)
REGISTERS = re.compile(r"Used (\d+) registers")
# The front end's, the assembler's; a kernel's name may have the word in it.
WARNING = re.compile(r"\bwarning\b", re.IGNORECASE)


def check(log, names):
    """Raise AssertionError unless all kernels compiled without a flaw."""
    assert not WARNING.search(log), log
    assert sorted(ENTRY.findall(log)) == sorted(names)
    used = [int(n) for n in REGISTERS.findall(log)]
    assert len(used) >= len(names)
    assert max(used) <= MOST_REGISTERS, log
    stacks = STACK.findall(log)
    assert len(stacks) >= len(names)
    assert {each for row in stacks for each in row} == {"0"}, log


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """A folder of the sources as CuPy gets them."""
    folder = tmp_path_factory.mktemp("sources")
    for file in kernels.files():
        (folder / file).write_text(kernels.source(file))
    return folder


@pytest.fixture(scope="module")
def nvrtc_processes(sources):
    """One process for each architecture, all at work; here, cupy is the simulator."""
    script = Path(__file__).with_name("nvrtc.py")
    paths = [str(sources / file) for file in kernels.files()]
    processes = {
        architecture: subprocess.Popen(
            [sys.executable, str(script), architecture, *paths],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for architecture in ARCHITECTURES
    }
    yield processes
    for process in processes.values():
        process.kill()
        process.communicate()


@pytest.fixture(scope="module", params=ARCHITECTURES)
def nvrtc_logs(request, nvrtc_processes):
    """What NVRTC said of each file, by CuPy's own way to it."""
    process = nvrtc_processes[request.param]
    output, errors = process.communicate(timeout=300)
    _skip_without_nvrtc(errors)
    assert process.returncode == 0, errors
    return {Path(path).name: log for path, log in json.loads(output).items()}


@pytest.mark.parametrize("file", kernels.files())
def test_nvrtc_compiles_without_a_flaw(nvrtc_logs, file):
    check(nvrtc_logs[file], kernels_of(file))


def test_an_unknown_architecture_is_named(sources):
    script = str(Path(__file__).with_name("nvrtc.py"))
    command = [sys.executable, script, "30", str(sources / "accumulate.cu")]
    errors = subprocess.run(command, capture_output=True, text=True, check=False).stderr
    _skip_without_nvrtc(errors)

    [cause] = [message for seen, message in kernels._CAUSES if re.search(seen, errors)]
    assert cause.startswith("the installed NVRTC does not support this device")


def _skip_without_nvrtc(errors):
    if re.search(r"No module named 'cupy|libnvrtc", errors):
        last = errors.strip().splitlines()[-1]
        if os.environ.get("HPCACCUM_REQUIRE_NVRTC") == "1":
            pytest.fail(f"HPCACCUM_REQUIRE_NVRTC=1, but {last}")
        pytest.skip(f"kernels cannot be compiled by NVRTC: {last}")


def kernels_of(file):
    """Return the names of a file's kernels, after macros are expanded."""
    source = re.sub(r"(?m)^#include.*$", "", kernels.source(file))
    command = ["g++", "-E", "-P", "-x", "c++", "-"]
    text = subprocess.run(
        command, input=source, capture_output=True, text=True, check=True
    ).stdout
    return re.findall(r"__global__ void __launch_bounds__\([^)]*\)\s+(\w+)\(", text)


def test_the_table_has_every_kernel_of_every_file():
    defined = {
        name: path.name
        for path in kernels.shipped("kernels").glob("*.cu")
        for name in kernels_of(path.name)
    }

    assert defined == kernels.FILES
    assert kernels.files() == sorted(set(defined.values()))
