"""NCCL: sums over processes.

A sum takes its input when it is called, after all that its stream has queued before,
and writes its result late. An input that changes in between is an error: NCCL would
have read either value. Ranks that make different calls get an error, where NCCL would
hang or return wrong sums. Processes exchange files.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import shutil
import tempfile
import time
from pathlib import Path

import numpy as np

from .device import Device
from .memory import _on_device
from .stream import _queue_of

__all__ = [
    "NCCL_FLOAT32",
    "NCCL_FLOAT64",
    "NCCL_SUM",
    "NcclCommunicator",
    "NcclError",
    "available",
    "get_unique_id",
]

available = True
NCCL_SUM = 0
NCCL_FLOAT32, NCCL_FLOAT64 = 7, 8
_DTYPES = {NCCL_FLOAT32: "f4", NCCL_FLOAT64: "f8"}
_ID_BYTES = 128
# Seconds until a rank that waits for another one raises an error; NCCL waits on.
_PATIENCE = 60.0

_TEXTS = {
    1: "NCCL_ERROR_UNHANDLED_CUDA_ERROR: unhandled cuda error (run with "
    "NCCL_DEBUG=INFO for details)",
    2: "NCCL_ERROR_SYSTEM_ERROR: unhandled system error (run with NCCL_DEBUG=INFO for "
    "details)",
    4: "NCCL_ERROR_INVALID_ARGUMENT: invalid argument (run with NCCL_DEBUG=WARN for "
    "details)",
    5: "NCCL_ERROR_INVALID_USAGE: invalid usage (run with NCCL_DEBUG=WARN for details)",
}


class NcclError(RuntimeError):
    """Raised when NCCL refuses; `_why` is what only a simulator knows."""

    def __init__(self, status, _why=""):
        self.status = status
        super().__init__(_TEXTS[status] + (f" ({_why})" if _why else ""))


def get_unique_id():
    """Return 128 bytes; here they name the folder in which processes meet."""
    return secrets.token_hex(16).encode().ljust(_ID_BYTES, b"\0")


class NcclCommunicator:
    """One rank of a communicator; waits until there are all of them."""

    def __init__(self, ndev, commId, rank):
        if not isinstance(commId, bytes):
            raise TypeError(
                f"Argument 'commId' has incorrect type (expected bytes, got "
                f"{type(commId).__name__})"
            )
        token = commId.rstrip(b"\0").decode()
        name = f"cupy-simulator-nccl-{os.getuid()}-{token}"
        self._folder = Path(tempfile.gettempdir()) / name
        self._folder.mkdir(exist_ok=True)
        self._size, self._rank, self._device = ndev, rank, Device().id
        self._calls, self._state = 0, "open"
        try:
            self._meet()
        except BaseException:
            self._state = "aborted"
            self._remove()
            raise

    def _remove(self):
        shutil.rmtree(self._folder, ignore_errors=True)

    def _meet(self):
        self._write("device", Device().pci_bus_id.encode())
        cards = [self._read("device", other) for other in range(self._size)]
        if len(set(cards)) < self._size:
            raise NcclError(5, f"Duplicate GPU detected: {cards}")

    def _path(self, what, rank):
        return self._folder / f"{what}.{rank}"

    def _write(self, what, content):
        new = self._path(f"new-{what}", self._rank)
        new.write_bytes(content)
        new.rename(self._path(what, self._rank))

    def _read(self, what, rank):
        """Return what a rank has written; wait for it."""
        path, begun = self._path(what, rank), time.monotonic()
        while self._state != "aborted":
            try:
                return path.read_bytes()
            except FileNotFoundError:
                time.sleep(0.0005)
            if time.monotonic() - begun > _PATIENCE:
                raise NcclError(2, f"waited for rank {rank}: {what}")
        return None

    def allReduce(self, sendbuf, recvbuf, count, datatype, op, stream):
        if self._state != "open":
            raise NcclError(4, self._state)
        if datatype not in _DTYPES or op != NCCL_SUM:
            raise NcclError(4)
        if count and not (_on_device(sendbuf) and _on_device(recvbuf)):
            raise NcclError(4, "not on the device")
        dtype = np.dtype(_DTYPES[datatype])
        nbytes = count * dtype.itemsize
        queue = _queue_of(stream, self._device)
        queue.run()
        mine = ctypes.string_at(sendbuf, nbytes)
        self._calls += 1
        call = f"call-{self._calls}"
        facts = f"{count} {dtype} {op}".encode()
        self._write(call, facts + b"\n" + mine)

        def action():
            if ctypes.string_at(sendbuf, nbytes) != mine:
                raise RuntimeError("the input of a sum of NCCL changed before its end")
            total = self._total(call, facts, dtype)
            if total is not None:
                ctypes.memmove(recvbuf, total, nbytes)

        queue.put_quietly(action)

    def _total(self, call, facts, dtype):
        """Return the sum over the ranks, as bytes; None after an abort."""
        if self._state == "destroyed":
            raise RuntimeError("a communicator of NCCL was destroyed before its sum")
        total = None
        # NCCL adds in an order of its own.
        for rank in reversed(range(self._size)):
            content = self._read(call, rank)
            if content is None:
                return None
            other, _, data = content.partition(b"\n")
            if other != facts:
                raise RuntimeError(
                    f"{call} of NCCL: rank {rank} sums {other}, rank {self._rank} "
                    f"{facts}"
                )
            part = np.frombuffer(data, dtype)
            with np.errstate(all="ignore"):
                total = part if total is None else total + part
        return total.tobytes()

    def check_async_error(self):
        """Raise if a sum has failed meanwhile: here none does."""

    def destroy(self):
        """Free it; sums must have ended."""
        self._leave("destroyed")

    def abort(self):
        """Free it; sums that wait for other ranks end."""
        self._leave("aborted")

    def _leave(self, state):
        if self._state != "open":
            return
        self._state = state
        with contextlib.suppress(FileNotFoundError):  # another rank removed it
            self._path("left", self._rank).touch()
        left = (self._path("left", other).exists() for other in range(self._size))
        if all(left):
            self._remove()

    def __del__(self):
        if getattr(self, "_state", "") == "open":
            self.destroy()
