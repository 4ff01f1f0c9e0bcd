"""The queues of the simulated devices: work runs as late as a stream allows.

What is put into a queue runs when the program waits for it. Besides, some of it runs at
random moments, as on a device that sometimes is quick. So both what is read too early
and what is overwritten too early show.

The order is that of CUDA: within a queue; between a device's null queue and its
blocking queues, in the order in which the work was put there; and what events order.
Source: CUDA C++ Programming Guide, "Streams", and the CUDA Runtime API, "Stream
synchronization behavior".
"""

from __future__ import annotations

import itertools
import math
import os
import random
import threading
from collections import deque
from typing import NamedTuple

from ._errors import CUDARuntimeError

lock = threading.RLock()

# The chance that putting or asking lets some work run; 0 is the latest device there is.
progress = 0.2

_random = random.Random(int(os.environ.get("CUPY_SIMULATOR_SEED", "0")))
_numbers = itertools.count(1)
_queues = []
_nulls = {}
_failures = []


class _Item(NamedTuple):
    number: int
    action: object
    host: tuple  # address and bytes of host memory it uses, or ()


class Queue:
    """Work of one stream, in order.

    Args:
        device: Number of the device.
        kind: "null", "blocking", or "free" from the null queue.
        pool: Identifies its free memory: the address of its stream, if it has one.
    """

    def __init__(self, device, kind="free", pool=None):
        self.device, self.kind = device, kind
        self.pool = object() if pool is None else pool
        self.closed = False
        self._items = deque()
        with lock:
            _queues.append(self)

    def put(self, action, *, host=()):
        """Queue an action; let something run, perhaps."""
        number = self.put_quietly(action, host=host)
        wander()
        return number

    def put_quietly(self, action, *, host=()):
        """Queue an action and run nothing, as destructors must; return its number."""
        with lock:
            number = next(_numbers)
            self._items.append(_Item(number, action, host))
            if self not in _queues:  # its stream is gone; memory of it was not
                _queues.append(self)
        return number

    def run(self, last=math.inf):
        """Run everything up to an item, and what that comes after."""
        with lock:
            while self._items and self._items[0].number <= last:
                item = self._items.popleft()
                for other in self._earlier():
                    other.run(item.number)
                try:
                    item.action()
                except Exception as error:
                    _failures.append(error)
            if self.closed and not self._items and self in _queues:
                _queues.remove(self)

    def _earlier(self):
        if self.kind == "null":
            return [
                queue
                for queue in list(_queues)
                if queue.kind == "blocking" and queue.device == self.device
            ]
        return [null_queue(self.device)] if self.kind == "blocking" else []

    def synchronize(self, last=math.inf):
        """Run, and raise if anything failed since the last wait."""
        self.run(last)
        raise_failure()

    def done(self, last=math.inf):
        """Whether everything up to an item has run."""
        wander()
        with lock:
            return not (self._items and self._items[0].number <= last)

    def uses(self, address, nbytes):
        """Whether work in here will read or write that host memory."""
        # A copy: the garbage collector may free device memory, which is work, too.
        return any(
            item.host
            and item.host[0] < address + nbytes
            and address < item.host[0] + item.host[1]
            for item in list(self._items)
        )

    def random_number(self):
        """Return the number of one of the items, or 0."""
        return _random.choice(self._items).number if self._items else 0


def null_queue(device):
    """Return the null queue of a device."""
    with lock:
        if device not in _nulls:
            _nulls[device] = Queue(device, "null")
        return _nulls[device]


def wander():
    """Let some work of some queue run, perhaps."""
    with lock:
        if progress and _random.random() < progress:
            busy = [queue for queue in _queues if queue.random_number()]
            if busy:
                queue = _random.choice(busy)
                queue.run(queue.random_number())


def synchronize_device(device=None):
    """Run all work of a device, or of all."""
    with lock:
        for queue in list(_queues):
            if device in (None, queue.device):
                queue.run()
    raise_failure()


def in_use(address, nbytes):
    """Whether queued work will read or write that host memory."""
    with lock:
        return any(queue.uses(address, nbytes) for queue in _queues)


def raise_failure():
    """Raise what failed on a device, as an error of CUDA's with its text."""
    with lock:
        if not _failures:
            return
        failure = _failures[0]
        _failures.clear()
    if isinstance(failure, CUDARuntimeError):
        raise failure
    raise CUDARuntimeError(719, f"{type(failure).__name__}: {failure}") from failure
