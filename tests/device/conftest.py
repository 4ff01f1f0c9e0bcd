"""Kernels and what launches them: on a simulated device or, with -m gpu, a real one."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

SIMULATOR = Path(__file__).parents[1] / "simulator"
# What they test is the simulator, or needs none: no use of a GPU.
NOT_FOR_A_GPU = {
    "test_compile",
    "test_kernels",
    "test_faults",
    "test_sanitizers",
    "test_simulator",
    "test_simulator_arrays",
    "test_simulator_fidelity",
    "test_simulator_kernels",
}
collect_ignore: list[str] = []
WITHOUT_SIMULATOR = {"test_compile", "test_simulator_fidelity"}


def pytest_configure(config: pytest.Config) -> None:
    # Before any test module is imported: `import cupy` is then the simulator.
    if on_gpu(config):
        collect_ignore.extend(f"{name}.py" for name in NOT_FOR_A_GPU)
    else:
        sys.path.insert(0, str(SIMULATOR))


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    here = [item for item in items if item.path.parent == Path(__file__).parent]
    if on_gpu(config):
        for item in here:
            item.add_marker("gpu")
        return
    if problem := _missing():
        skip = pytest.mark.skip(reason=problem)
        for item in here:
            if item.path.stem not in WITHOUT_SIMULATOR:
                item.add_marker(skip)


def on_gpu(config: pytest.Config) -> bool:
    return config.option.markexpr.strip() == "gpu"


def _missing() -> str:
    import cpu_cuda

    problem = cpu_cuda.missing()
    if problem and os.environ.get("HPCACCUM_REQUIRE_KERNELS") == "1":
        pytest.exit(f"HPCACCUM_REQUIRE_KERNELS=1, but {problem}", returncode=1)
    return f"kernels cannot be built for the CPU: {problem}" if problem else ""
