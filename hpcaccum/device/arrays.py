"""Arrays on a CUDA device: the only module that imports CuPy.

Programs without CuPy arrays never import it: an array can only be CuPy's if the module
was imported before.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import warnings
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from hpcaccum.dtypes import Array
from hpcaccum.errors import DeviceUnavailableError, InvalidArgumentError

logger = logging.getLogger("hpcaccum")

# Older versions lack headers that the kernels include.
_OLDEST = 14
_INSTALL = "pip install 'cupy-cuda13x>=14', or cupy-cuda12x for CUDA 12"
# Streams whose work may not be complete. From so many on, the others are dropped.
_busy: set[Any] = set()
_FEW = 16


def is_device(array: object) -> bool:
    """Whether this is an array on a device."""
    if type(array) is np.ndarray or array is None:
        return False
    kind = getattr(sys.modules.get("cupy"), "ndarray", None)
    return kind is not None and isinstance(array, kind)


def library(array: object) -> Any:
    """Return the module of an array's library: NumPy or CuPy."""
    return cupy() if is_device(array) else np


@functools.cache
def cupy() -> Any:
    """Return CuPy."""
    try:
        import cupy as module
    except ImportError as error:
        raise DeviceUnavailableError(
            f"CuPy, which hpcaccum uses on a device, cannot be imported ({error}); "
            f"{_INSTALL}"
        ) from None
    if int(module.__version__.split(".")[0]) < _OLDEST:
        raise DeviceUnavailableError(
            f"CuPy {module.__version__} is too old, hpcaccum needs {_OLDEST} or newer: "
            f"{_INSTALL}"
        )
    try:
        count = module.cuda.runtime.getDeviceCount()
    except module.cuda.runtime.CUDARuntimeError as error:
        raise DeviceUnavailableError(
            f"CuPy {module.__version__} finds no CUDA device: {error}; does "
            f"nvidia-smi show one, and is CUDA_VISIBLE_DEVICES not empty?"
        ) from None
    if not count:
        raise DeviceUnavailableError("there is no CUDA device on this machine")
    return module


def nccl_library() -> Any:
    """Return CuPy's module of NCCL."""
    cupy()
    with warnings.catch_warnings():
        # CuPy warns of what is an error here.
        warnings.simplefilter("ignore")
        from cupy.cuda import nccl as module
    if not module.available:
        raise DeviceUnavailableError(
            "CuPy finds no NCCL: pip install nvidia-nccl-cu13, or nvidia-nccl-cu12 for "
            "CUDA 12"
        )
    return module


def use_device(number: int) -> int:
    """Make a device the current one of this process; return its number.

    Args:
        number: Number of the rank on its node. If there are fewer devices, ranks share
            them in turn.

    Raises:
        DeviceUnavailableError: If there is no device.
    """
    runtime = cupy().cuda
    chosen = number % int(runtime.runtime.getDeviceCount())
    runtime.Device(chosen).use()
    return chosen


def shared_array(tensor: Any) -> Array:
    """Return an array that shares the memory of a tensor of another library."""
    return cupy().from_dlpack(tensor)  # type: ignore[no-any-return]


def current_device() -> int:
    """Return the number of the current device."""
    return cupy().cuda.runtime.getDevice()  # type: ignore[no-any-return]


def check_current(what: str, number: int) -> None:
    """Raise unless a device is the current one."""
    current = current_device()
    if number != current:
        raise InvalidArgumentError(
            f"{what} is on device {number}, the current one is {current}; "
            f"call cupy.cuda.Device({number}).use() first"
        )


def current_stream() -> Any:
    """Return the stream on which CuPy queues work of this thread.

    It is kept until its work is complete. CuPy keeps the memory that was freed on a
    stream by the stream's address, which CUDA gives to the next one even before.
    """
    stream = cupy().cuda.get_current_stream()
    if stream not in _busy:
        _keep(stream)
    return stream


def _keep(stream: Any) -> None:
    # Not CuPy's `ExternalStream`: its owner may destroy it before it is asked below.
    if not isinstance(stream, cupy().cuda.Stream):
        return
    if len(_busy) >= _FEW:
        for each in list(_busy):
            if each.done:
                _busy.discard(each)
    _busy.add(stream)


def new_event() -> Any:
    """Return an event that orders work; it does not time it, which takes longer."""
    return cupy().cuda.Event(disable_timing=True)


class _ForeignStream(NamedTuple):
    """A stream of another library, as CUDA's stream protocol of cuda.core passes it."""

    address: int

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.address


@contextlib.contextmanager
def on_stream(address: int) -> Iterator[None]:
    """Make a stream of another library the current one of this thread, for a block."""
    kind = cupy().cuda.Stream
    stream = kind.from_external(_ForeignStream(address)) if address else kind.null
    try:
        with stream:
            yield
    finally:
        # Its owner may destroy it now.
        _busy.discard(stream)


def device_facts() -> dict[str, Any]:
    """Return the properties of the current device that figures depend on."""
    module = cupy()
    runtime, current = module.cuda.runtime, module.cuda.Device()
    name = runtime.getDeviceProperties(current.id)["name"]
    driver = runtime.driverGetVersion()
    return {
        "device": name.decode() if isinstance(name, bytes) else str(name),
        "devices": runtime.getDeviceCount(),
        "device_memory": current.mem_info[1],
        # 13000 is 13.0.
        "driver": f"{driver // 1000}.{driver % 1000 // 10}",
        "cupy": module.__version__,
    }


def device_name() -> str:
    """Return name and memory of the current device, and versions of CUDA and CuPy."""
    facts = device_facts()
    return (
        f"{facts['device']}, {facts['device_memory'] / 2**30:.0f} GiB, "
        f"CUDA {facts['driver']}, CuPy {facts['cupy']}"
    )


def check_array(what: str, array: Any, floats: Iterable[Any]) -> None:
    """Raise unless kernels, which get a bare pointer, can use a device array."""
    if array.dtype not in floats:
        names = ", ".join(str(each) for each in floats)
        raise InvalidArgumentError(
            f"{what}: an array on the device must be of {names}, got {array.dtype}"
        )
    if not array.flags.c_contiguous:
        raise InvalidArgumentError(
            f"{what}: an array on the device must be contiguous, got strides "
            f"{array.strides} for {array.shape}; pass cupy.ascontiguousarray of it"
        )
    check_current(what, array.data.device_id)


def check_device_array(
    what: str, array: Any, shape: tuple[int, ...], dtypes: Any
) -> None:
    """Raise InvalidArgumentError unless kernels can use this array."""
    if not is_device(array):
        raise InvalidArgumentError(
            f"{what} must be an array on the device, got {type(array).__name__}"
        )
    if array.shape != shape:
        raise InvalidArgumentError(f"{what} must have shape {shape}, got {array.shape}")
    check_array(what, array, dtypes)


def all_on_device(what: str, arrays: Iterable[Any]) -> bool:
    """Whether all arrays are on the device; False for no array."""
    found = {is_device(array) for array in arrays}
    if len(found) > 1:
        raise InvalidArgumentError(
            f"{what}: some arrays are on the device and some on the host; "
            f"move them to one place with cupy.asarray or cupy.asnumpy"
        )
    return found == {True}


def copyto(target: Any, source: Any) -> None:
    """Copy an array to another of its shape, each on the device or in CPU memory.

    Converts to the target's dtype; an overflow is inf, without a warning. On return,
    CPU memory is complete or may be overwritten. Copies within the device are as
    asynchronous as all of CuPy.
    """
    from_device, to_device = is_device(source), is_device(target)
    if from_device or to_device:
        # Keeps it, for what the program queues on it after this call.
        current_stream()
    if from_device and to_device:
        target[...] = source
    elif from_device:
        _fetch(target, source)
    elif to_device:
        _send(target, source)
    else:
        copy_quietly(target, source)


def copy_quietly(target: Array, source: Array) -> None:
    """Copy an array to another of its shape; an overflow is inf, without a warning."""
    if source.dtype == target.dtype:
        np.copyto(target, source)
        return
    with np.errstate(all="ignore"):
        np.copyto(target, source, casting="same_kind")


def _fetch(target: Array, source: Any) -> None:
    narrow = source.astype(target.dtype, copy=False)
    if target.flags.c_contiguous:
        narrow.get(out=target)
    else:
        target[...] = narrow.get()


def _send(target: Any, source: Any) -> None:
    # `ascontiguousarray` would give a number a dimension.
    source = np.asarray(source, order="C")
    if source.shape != target.shape:
        source = np.broadcast_to(source, target.shape).copy()
    if source.dtype == target.dtype and target.flags.c_contiguous:
        target.set(source)
    else:
        target[...] = cupy().asarray(source)
    # A copy from pinned memory is asynchronous.
    current_stream().synchronize()


def release(arrays: dict[str, Any]) -> None:
    """Drop arrays; those on a device after waiting for all work queued on it.

    A stream other than the one that they were allocated on may still use them.
    """
    for array in arrays.values():
        if is_device(array):
            array.device.synchronize()
            break
    arrays.clear()


def to_host(array: Any) -> Array:
    """Return an array in CPU memory: itself, or a copy of a device array."""
    if not is_device(array):
        return array  # type: ignore[no-any-return]
    # Keeps it, as in `copyto`.
    current_stream()
    return array.get()  # type: ignore[no-any-return]


class Pinned:
    """Contiguous CPU memory that is pinned, so that the device accesses it directly.

    Copies from memory that is not pinned pass through the driver's buffers: half as
    fast, and the host waits for them. If pinning fails, for example because of a limit
    on locked memory, a warning is logged.
    """

    def __init__(self, memory: Array) -> None:
        runtime = cupy().cuda.runtime
        self._address = memory.ctypes.data if memory.size else 0
        try:
            if self._address:
                runtime.hostRegister(self._address, memory.nbytes, 0)
        except runtime.CUDARuntimeError as error:
            self._address = 0
            logger.warning(
                "%.1f MiB of host memory cannot be pinned, copies to and from the "
                "device will be slower: %s",
                memory.nbytes / 2**20,
                error,
            )

    def free(self) -> None:
        """Unpin the memory."""
        if self._address:
            cupy().cuda.runtime.hostUnregister(self._address)
            self._address = 0
