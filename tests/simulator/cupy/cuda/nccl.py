"""NCCL: sums over processes, which exchange files.

A sum takes its input when it is called, after all that its stream has queued before,
and writes its result late. An input that changes in between is an error: NCCL would
have read either value.
"""

from __future__ import annotations

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

available = True
NCCL_SUM = 0
NCCL_FLOAT32, NCCL_FLOAT64 = 7, 8
_DTYPES = {NCCL_FLOAT32: np.dtype("f4"), NCCL_FLOAT64: np.dtype("f8")}
# Seconds until a rank that waits for another one raises an error; NCCL waits on.
_PATIENCE = 60.0
_NAMES = {1: "UNHANDLED_CUDA_ERROR", 2: "SYSTEM_ERROR", 4: "INVALID_ARGUMENT"}


class NcclError(RuntimeError):
    """Raised when NCCL refuses."""

    def __init__(self, status):
        super().__init__(f"NCCL_ERROR_{_NAMES[status]}")


def get_unique_id():
    """Return 128 bytes; here they name the folder in which processes meet."""
    return secrets.token_hex(64).encode()


class NcclCommunicator:
    """One rank of a communicator; waits until there are all of them."""

    def __init__(self, ndev, commId, rank):
        name = f"cupy-simulator-nccl-{os.getuid()}-{commId.decode()}"
        self._folder = Path(tempfile.gettempdir()) / name
        self._folder.mkdir(exist_ok=True)
        self._ranks, self._rank, self._device = range(ndev), rank, Device().id
        self._calls, self._state = 0, "open"
        try:
            self._write("here", b"")
            for other in self._ranks:
                self._read("here", other)
        except BaseException:
            self._state = "aborted"
            shutil.rmtree(self._folder, ignore_errors=True)
            raise

    def _write(self, what, content):
        new = self._folder / f"new.{self._rank}"
        new.write_bytes(content)
        new.rename(self._folder / f"{what}.{self._rank}")

    def _read(self, what, rank):
        """Return what a rank has written; wait for it."""
        begun = time.monotonic()
        while True:
            try:
                return (self._folder / f"{what}.{rank}").read_bytes()
            except FileNotFoundError:
                time.sleep(0.0005)
            if time.monotonic() - begun > _PATIENCE:
                raise NcclError(2)

    def allReduce(self, sendbuf, recvbuf, count, datatype, op, stream):
        on_device = not count or (_on_device(sendbuf) and _on_device(recvbuf))
        if self._state != "open" or op != NCCL_SUM or not on_device:
            raise NcclError(4)
        dtype = _DTYPES[datatype]
        nbytes = count * dtype.itemsize
        queue = _queue_of(stream, self._device)
        queue.run()
        mine = ctypes.string_at(sendbuf, nbytes)
        self._calls += 1
        call = f"call-{self._calls}"
        self._write(call, mine)

        def action():
            assert ctypes.string_at(sendbuf, nbytes) == mine, "NCCL's input has changed"
            assert self._state != "destroyed", "a sum of NCCL has not ended"
            if self._state == "open":
                # NCCL adds in an order of its own.
                parts = [self._read(call, rank) for rank in reversed(self._ranks)]
                with np.errstate(all="ignore"):
                    total = sum(np.frombuffer(part, dtype) for part in parts)
                ctypes.memmove(recvbuf, total.tobytes(), nbytes)

        queue.put_quietly(action)

    def check_async_error(self):
        """Raise if a sum has failed meanwhile: here none does."""

    def destroy(self):
        """Free it; sums must have ended."""
        self._leave("destroyed")

    def abort(self):
        """Free it; sums that wait for other ranks do nothing."""
        self._leave("aborted")

    def _leave(self, state):
        if self._state == "open":
            self._state = state
            self._write("left", b"")
            if all((self._folder / f"left.{rank}").exists() for rank in self._ranks):
                shutil.rmtree(self._folder, ignore_errors=True)
