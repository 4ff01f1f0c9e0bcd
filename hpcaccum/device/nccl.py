"""Sums of device memory over processes, by NCCL."""

from __future__ import annotations

from typing import Any

import numpy as np

from hpcaccum.device.arrays import cupy, current_stream, nccl_library


def card() -> str:
    """Return the PCI bus id of the current device: the same in every process."""
    return str(cupy().cuda.Device().pci_bus_id)


def unique_id() -> bytes:
    """Return what one process makes, and all pass to `NcclSum`."""
    return nccl_library().get_unique_id()  # type: ignore[no-any-return]


class NcclSum:
    """Sums vectors of the current devices of several processes in place. Collective.

    Making one waits for all processes, without a time limit. It makes a first sum,
    because NCCL connects the devices only then, and raises a RuntimeError if that is
    wrong. All pass the same ``identity``, the `unique_id` of one of them.
    """

    def __init__(self, size: int, identity: bytes, rank: int) -> None:
        module = nccl_library()
        self._types = {
            np.dtype(np.float32): module.NCCL_FLOAT32,
            np.dtype(np.float64): module.NCCL_FLOAT64,
        }
        self._operation: int = module.NCCL_SUM
        self._comm = module.NcclCommunicator(size, identity, rank)
        try:
            self._try(size)
        except BaseException:
            self.abort()
            raise

    def _try(self, size: int) -> None:
        with cupy().cuda.Stream(non_blocking=True):
            one = cupy().ones(1, np.float32)
            self(one)
            found = float(one.get()[0])
        if found != size:
            raise RuntimeError(f"the sum of {size} ones is {found}")

    def __call__(self, vector: Any) -> None:
        """Replace a vector by the sum over all processes, on the current stream."""
        address, stream = vector.data.ptr, current_stream()
        kind = self._types[vector.dtype]
        self._comm.allReduce(
            address, address, vector.size, kind, self._operation, stream.ptr
        )

    def check(self) -> None:
        """Raise an error if a sum that was queued has failed."""
        self._comm.check_async_error()

    def abort(self) -> None:
        """End the sums that wait for other processes, and free all. Not collective."""
        self._comm.abort()

    def free(self) -> None:
        """Free all, after all sums have ended."""
        self._comm.destroy()
