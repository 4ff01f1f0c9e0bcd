"""What the tests with device arrays share: a device, real with ``-m gpu``, else not."""

from __future__ import annotations

from typing import Any

import pytest

from hpcaccum import DeviceUnavailableError
from hpcaccum.device import arrays as device
from hpcaccum.mpi import group_of
from hpcaccum.mpi.job import runtime

from .. import simulator

# What is done with device arrays depends on the ranks by whether there are others, and
# on which nodes: three are the least with a node of one rank beside a larger one.
FEW_RANKS = pytest.mark.ranks(max=3)


def wants_gpu(config: pytest.Config) -> bool:
    return config.option.markexpr == "gpu"


@pytest.fixture(scope="session", name="cp")
def device_library(request: pytest.FixtureRequest) -> Any:
    """CuPy, or what stands in for it; the rank's own device is the current one."""
    if not wants_gpu(request.config):
        simulator.install()
        if reason := simulator.skip_reason():
            pytest.skip(reason)
    from mpi4py import MPI

    device.use_device(MPI.COMM_WORLD.rank)
    return device.cupy()


@pytest.fixture
def own_card(
    cp: Any, comm: Any, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Any:
    """Each rank has a device of its own, which is the current one, and NCCL."""
    if not group_of(comm).single_node:
        pytest.skip("needs ranks on one node")
    monkeypatch.setenv("CUPY_SIMULATOR_DEVICES", "4")
    if cp.cuda.runtime.getDeviceCount() < comm.size:
        pytest.skip(f"needs a GPU for each of {comm.size} ranks")
    # Also imports it: `cupy.cuda` does not.
    try:
        device.nccl_library()
    except DeviceUnavailableError as error:
        pytest.skip(str(error))
    device.use_device(comm.rank)
    yield
    cp.cuda.Device().synchronize()
    cp.cuda.Device(0).use()


@pytest.fixture
def pinned(cp: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The addresses of host memory that is pinned now, and whether any ever was."""
    now: dict[int, int] = {}
    runtime = cp.cuda.runtime
    register, unregister = runtime.hostRegister, runtime.hostUnregister

    def pin(address: int, nbytes: int, flags: int) -> None:
        register(address, nbytes, flags)
        now[address] = nbytes

    def unpin(address: int) -> None:
        unregister(address)
        del now[address]

    monkeypatch.setattr(runtime, "hostRegister", pin)
    monkeypatch.setattr(runtime, "hostUnregister", unpin)
    yield now
    assert not now, f"still pinned: {now}"


@pytest.fixture
def aware(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An MPI that takes device memory: that of a simulated device, any MPI does."""
    ask = runtime.cuda_awareness
    ask.cache_clear()
    if wants_gpu(request.config) and not ask().aware:
        pytest.skip("this MPI would die of a device pointer")
    monkeypatch.setenv(runtime.VARIABLE, "1")
    ask.cache_clear()
    yield
    ask.cache_clear()


class Aware:
    """A communicator that takes device memory as Open MPI does: by blocking calls.

    Attributes:
        given: How often it got some.
    """

    def __init__(self, comm: Any) -> None:
        self._comm, self.given = comm, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    def Allreduce(self, *buffers: Any) -> None:
        self.given += any(map(device.is_device, buffers))
        self._comm.Allreduce(*buffers)

    def Iallreduce(self, *buffers: Any) -> Any:
        assert not any(map(device.is_device, buffers[:2])), "Open MPI would crash"
        return self._comm.Iallreduce(*buffers)

    @staticmethod
    def of(reducer: Any) -> Aware:
        """Put one into a reducer and return it."""
        found = reducer._schedule._comm = Aware(reducer._schedule._comm)
        return found


def to_device(cp: Any, arrays: Any) -> dict[str, Any]:
    """Return copies of arrays on the device, by name."""
    return {name: cp.asarray(array) for name, array in arrays.items()}


def empty_like(cp: Any, shapes: Any, dtype: Any) -> dict[str, Any]:
    """Return arrays on the device with nothing useful in them."""
    return {name: cp.full(shape, -7, dtype) for name, shape in shapes.items()}
