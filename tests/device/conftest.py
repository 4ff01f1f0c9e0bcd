"""Kernels and what launches them: on a simulated device or, with -m gpu, a real one."""

from __future__ import annotations

from pathlib import Path

import pytest

import hpcaccum as hpc

from ..simulator import install, skip_reason

# They run only on the simulator.
NOT_FOR_A_GPU = {
    "test_kernels",
    "test_faults",
    "test_sanitizers",
}
collect_ignore: list[str] = []


def pytest_configure(config: pytest.Config) -> None:
    # Before any test module is imported: `import cupy` is then the simulator.
    if on_gpu(config):
        collect_ignore.extend(f"{name}.py" for name in NOT_FOR_A_GPU)
    else:
        install()


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    here = [item for item in items if item.path.parent == Path(__file__).parent]
    if on_gpu(config):
        for item in here:
            item.add_marker("gpu")
        return
    if here and (reason := skip_reason()):
        skip = pytest.mark.skip(reason=reason)
        for item in here:
            item.add_marker(skip)


def on_gpu(config: pytest.Config) -> bool:
    return config.option.markexpr.strip() == "gpu"


# In which forms gradients come: an array, or several by name, one of them empty.
@pytest.fixture(params=["one", "named"])
def form(request):
    return request.param


@pytest.fixture
def make(form):
    """Make accumulators of a form, and free them."""
    made = []

    def accumulator(dtype="float32", shape=(2,), **options):
        wanted = shape
        if form == "named":
            wanted = {"weight": shape, "none": (0, 3), "bias": shape}
        made.append(hpc.DeviceAccumulator(dtype, wanted, **options))
        return made[-1]

    yield accumulator
    for each in made:
        each.free()


@pytest.fixture
def acc(make):
    return make("float64")
