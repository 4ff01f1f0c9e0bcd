"""Streams and events."""

from __future__ import annotations

import itertools
import sys
import threading
import time
import weakref

from .. import _queues
from .._errors import CUDARuntimeError
from .device import get_device_id

# A new stream gets the address of one that is gone, whose work may not be complete:
# CUDA gives addresses again at once.  Source: rapidsai/rmm, issue 649.
_gone = []
_pointers = itertools.count(0x51000, 0x100)
_streams = weakref.WeakValueDictionary()
_current = threading.local()


class Stream:
    """A new stream of the current device.

    The default stream belongs to whatever device is current when it is used.
    """

    def __init__(self, *, non_blocking=False):
        self.device_id = get_device_id()
        self.ptr = _gone.pop() if _gone else next(_pointers)
        kind = "free" if non_blocking else "blocking"
        self._own = _queues.Queue(self.device_id, kind, self.ptr)
        _streams[self.ptr] = self
        self._before = []

    def __del__(self, is_finalizing=sys.is_finalizing):
        if is_finalizing():
            return
        # Its work goes on: cudaStreamDestroy returns at once.
        own = None if hasattr(self, "_foreign") else getattr(self, "_own", None)
        if own is not None:
            own.closed = True
            _gone.append(self.ptr)

    @classmethod
    def from_external(cls, obj):
        _, ptr = obj.__cuda_stream__()
        stream = cls.__new__(cls)
        stream.device_id, stream.ptr = get_device_id(), ptr
        stream._own, stream._before = _queue_of(ptr), []
        stream._foreign = obj
        return stream

    @property
    def _queue(self):
        return self._own or _queues.null_queue(get_device_id())

    def __eq__(self, other):
        return isinstance(other, Stream) and self.ptr == other.ptr

    def __hash__(self):
        return hash(self.ptr)

    def __enter__(self):
        self._before.append(get_current_stream())
        return self.use()

    def __exit__(self, *error):
        _table()[get_device_id()] = self._before.pop()

    def use(self):
        device = get_device_id()
        if self._own is not None and self.device_id != device:
            raise RuntimeError(f"This stream was not created on device {device}")
        _table()[device] = self
        return self

    @property
    def done(self):
        return self._queue.done()

    def synchronize(self):
        self._queue.synchronize()

    def record(self, event=None):
        event = Event() if event is None else event
        event.record(self)
        return event

    def wait_event(self, event):
        """Let what is queued from now on come after an event; the host goes on."""
        if event._queue is not None:
            other, number = event._queue, event._number
            self._queue.put(lambda: other.run(number))


class Event:
    """A place in a stream."""

    def __init__(self, block=False, disable_timing=False, interprocess=False):
        get_device_id()
        self._timed = not disable_timing
        self._queue, self._number, self._time = None, 0, [None]

    def record(self, stream=None):
        stamp = self._time = [None]
        self._queue = (stream or get_current_stream())._queue
        self._number = self._queue.put(lambda: _stamp(stamp))

    @property
    def done(self):
        """Whether the stream got there; also if it was never recorded."""
        return self._queue is None or self._queue.done(self._number)

    def synchronize(self):
        if self._queue is not None:
            self._queue.synchronize(self._number)


def _stamp(stamp):
    stamp[0] = time.perf_counter()


def get_elapsed_time(start_event, end_event):
    if not (start_event._timed and end_event._timed):
        raise CUDARuntimeError(400)
    begin, end = start_event._time[0], end_event._time[0]
    if begin is None or end is None:
        raise CUDARuntimeError(600)
    return (end - begin) * 1e3


def get_current_stream(device_id=-1):
    device = get_device_id() if device_id == -1 else device_id
    return _table().get(device, Stream.null)


def _table():
    if not hasattr(_current, "streams"):
        _current.streams = {}
    return _current.streams


def _queue_of(stream=None, device=None):
    """Return the queue of a stream, an address of one, or of the current stream."""
    device = get_device_id() if device is None else device
    if stream is None:
        stream = get_current_stream(device)
    elif isinstance(stream, int):
        stream = Stream.null if stream in (0, 1) else _streams.get(stream)
    if stream is Stream.null:
        return _queues.null_queue(device)
    if stream is None or stream.device_id != device:
        raise CUDARuntimeError(400)
    return stream._own


# Made without asking for a device: modules must be importable without one.
Stream.null = Stream.__new__(Stream)
Stream.null.device_id, Stream.null.ptr = -1, 0
Stream.null._own, Stream.null._before = None, []
