"""Devices: how many there are is said by CUPY_SIMULATOR_DEVICES, one by default."""

from __future__ import annotations

import os
import threading

from .. import _queues
from .._errors import CUDARuntimeError

_MEMORY = 8 << 30
_current = threading.local()


def _count():
    """Return the number of devices; raise as CUDA does where there is no driver."""
    count = int(os.environ.get("CUPY_SIMULATOR_DEVICES", "1"))
    if not count:
        raise CUDARuntimeError(35)
    return count


def get_device_id():
    _count()
    return getattr(_current, "number", 0)


def _use(number):
    if not 0 <= number < _count():
        raise CUDARuntimeError(101)
    _current.number = number


class Device:
    """A device; the current one by default."""

    def __init__(self, device=None):
        self.id = get_device_id() if device is None else int(device)
        self._before = []

    def __eq__(self, other):
        return isinstance(other, Device) and self.id == other.id

    def __hash__(self):
        return hash(self.id)

    def __enter__(self):
        before = get_device_id()
        _use(self.id)
        self._before.append(before)
        return self

    def __exit__(self, *error):
        _use(self._before.pop())

    def use(self):
        _use(self.id)

    def synchronize(self):
        _check(self.id)
        _queues.synchronize_device(self.id)

    @property
    def attributes(self):
        """What the driver says about it; a few."""
        _check(self.id)
        return {"MultiProcessorCount": 2}

    @property
    def pci_bus_id(self):
        """Where it is in the machine: the same in all processes."""
        _check(self.id)
        return f"0000:{self.id + 1:02X}:00.0"

    @property
    def mem_info(self):
        from .memory import _used_bytes

        _check(self.id)
        return _MEMORY - _used_bytes(self.id), _MEMORY


def _check(number):
    if not 0 <= number < _count():
        raise CUDARuntimeError(101)
