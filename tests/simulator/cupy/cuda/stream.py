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

__all__ = ["Event", "Stream", "get_current_stream", "get_elapsed_time"]

# A new stream gets the address of one that is gone, whose work may not be complete:
# CUDA gives addresses again at once.  Source: rapidsai/rmm, issue 649.
_gone = []
_pointers = itertools.count(0x51000, 0x100)
_streams = weakref.WeakValueDictionary()
_current = threading.local()


class Stream:
    """A stream; a new one of the current device unless it is one of the defaults.

    The two default streams belong to whatever device is current when they are used.
    """

    def __init__(self, null=False, non_blocking=False, ptds=False, priority=None):
        self.device_id = get_device_id()
        self._default = 0 if null else 2 if ptds else None
        if self._default is None:
            self.ptr = _gone.pop() if _gone else next(_pointers)
            kind = "free" if non_blocking else "blocking"
            self._own = _queues.Queue(self.device_id, kind, self.ptr)
            _streams[self.ptr] = self
        else:
            self.ptr, self._own = self._default, None
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
        stream.device_id, stream.ptr, stream._default = get_device_id(), ptr, None
        stream._own, stream._before = _queue_of(ptr), []
        stream._foreign = obj
        return stream

    @property
    def _queue(self):
        if self._own is not None:
            return self._own
        if self._default == 0:
            return _queues.null_queue(get_device_id())
        return _thread_queue(get_device_id())

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


def _thread_queue(device):
    if not hasattr(_current, "queues"):
        _current.queues = {}
    if device not in _current.queues:
        _current.queues[device] = _queues.Queue(device, "blocking")
    return _current.queues[device]


def _queue_of(stream=None, device=None):
    """Return the queue of a stream, an address of one, or of the current stream."""
    device = get_device_id() if device is None else device
    if stream is None:
        stream = get_current_stream(device)
    elif isinstance(stream, int):
        stream = {0: Stream.null, 1: Stream.null, 2: Stream.ptds}.get(
            stream
        ) or _streams.get(stream)
    if stream is None:
        raise CUDARuntimeError(400)
    if stream._own is None:
        if stream._default == 0:
            return _queues.null_queue(device)
        return _thread_queue(device)
    if stream.device_id != device:
        raise CUDARuntimeError(400)
    return stream._own


def _default(pointer):
    # Made without asking for a device: modules must be importable without one.
    stream = Stream.__new__(Stream)
    stream.device_id, stream.ptr, stream._default = -1, pointer, pointer
    stream._own, stream._before = None, []
    return stream


Stream.null = _default(0)
Stream.ptds = _default(2)
