"""CUDA devices: arrays, kernels, and transfers to and from CPU memory.

`arrays` is the only module that imports CuPy, when a device is first used. `kernels`
compiles and launches the sources in ``kernels/``. `tables` has what a launch over many
arrays reads. `PointerTable` launches kernels that move named arrays. `Transfer` copies
named arrays between device and CPU memory. `NcclSum` sums device memory over processes.

Imports `layout`, `files` and the modules below them.
"""

from __future__ import annotations

from hpcaccum.device.arrays import (
    Pinned,
    all_on_device,
    check_array,
    check_current,
    check_device_array,
    copy_quietly,
    copyto,
    cupy,
    current_device,
    current_stream,
    device_facts,
    device_name,
    is_device,
    library,
    nccl_library,
    new_event,
    on_stream,
    release,
    shared_array,
    to_host,
    use_device,
)
from hpcaccum.device.multi_tensor import PointerTable, largest
from hpcaccum.device.nccl import NcclSum, card, unique_id
from hpcaccum.device.transfer import Transfer

__all__ = [
    "NcclSum",
    "Pinned",
    "PointerTable",
    "Transfer",
    "all_on_device",
    "card",
    "check_array",
    "check_current",
    "check_device_array",
    "copy_quietly",
    "copyto",
    "cupy",
    "current_device",
    "current_stream",
    "device_facts",
    "device_name",
    "is_device",
    "largest",
    "library",
    "nccl_library",
    "new_event",
    "on_stream",
    "release",
    "shared_array",
    "to_host",
    "unique_id",
    "use_device",
]
