"""The step and the counts of an accumulator on a device, and the order of launches."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hpcaccum import device
from hpcaccum.accumulator.receipts import MAX_LAG, Receipt, Tally
from hpcaccum.arguments import step_number
from hpcaccum.errors import FreedError, InvalidArgumentError
from hpcaccum.mpi import Freeable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hpcaccum.deadline import Deadline

logger = logging.getLogger("hpcaccum")

# Words of the header that the kernels keep; the lags follow. See kernels/common.cuh.
_STEP, _COUNT, _ACCEPTED, _DROPPED, _TICKET = range(5)
_LAGS = _TICKET + 1
_WORDS = _LAGS + MAX_LAG + 1


@dataclass(frozen=True)
class DeviceStatistics:
    """A look at an accumulator on a device.

    Attributes:
        global_step: The step now.
        num_accumulated: Gradients that no take has handed out yet.
        tally: Gradients accepted and dropped so far, and their lags.
        nbytes: Memory of the device that the sum takes.
    """

    global_step: int
    num_accumulated: int
    tally: Tally
    nbytes: int


class DeviceReceipt:
    """What became of one gradient, once the device knows; true if it was accepted.

    Asking for anything but ``local_step`` waits until the device is done with it.

    Attributes:
        local_step: The step it was computed at.
    """

    def __init__(self, local_step: int, met: Any, done: Any, looking: Any) -> None:
        self.local_step = local_step
        self._met, self._done, self._looking = met, done, looking

    @functools.cached_property
    def _known(self) -> Receipt:
        self._done.synchronize()
        # On a stream of its own: later work of the caller's is not waited for.
        met = int(self._met.get(stream=self._looking)[0])
        return Receipt(self.local_step >= met, self.local_step, met)

    @property
    def accepted(self) -> bool:
        """Whether it counts."""
        return self._known.accepted

    @property
    def global_step(self) -> int:
        """The step it met."""
        return self._known.global_step

    @property
    def lag(self) -> int:
        """How many steps it was late."""
        return self._known.lag

    def __bool__(self) -> bool:
        """Return whether the gradient was accepted."""
        return self.accepted

    def __repr__(self) -> str:
        """Show the fields; waits."""
        return f"Device{self._known!r}"


class DeviceRounds:
    """The header of an accumulator on the current device, which its kernels keep.

    Threads and streams may be several: what is queued in one `turn` comes after what
    was queued in the turn before, whatever the streams.

    Args:
        what: Name of the accumulator; begins messages.
        nbytes: Of its sum.
    """

    def __init__(self, what: str, nbytes: int) -> None:
        cuda = device.cupy().cuda
        self.what = what
        self.header: Any = device.cupy().zeros(_WORDS, np.int64)
        self._nbytes = nbytes
        self._device = cuda.Device().id
        self._looking = cuda.Stream(non_blocking=True)
        self._lock = threading.Lock()
        self._takes = threading.Lock()
        self._turns = 0
        self._looks: list[_Look] = []
        # What turns read, until the device has done so, in the order of the turns.
        self._read: deque[tuple[Any, Any]] = deque()
        self._last = _record(_current_stream())
        self._freed = False

    def check(self) -> None:
        """Raise unless this can be used here.

        Raises:
            FreedError: If it was freed.
            InvalidArgumentError: If another device is the current one.
        """
        if self._freed:
            raise FreedError(f"accumulator {self.what!r} was freed")
        current = device.cupy().cuda.Device().id
        if current != self._device:
            raise InvalidArgumentError(
                f"{self.what} is on device {self._device}, the current one is {current}"
            )

    @contextlib.contextmanager
    def turn(self, reads: Any = None) -> Iterator[None]:
        """Let the current stream go after all turns before this one.

        Args:
            reads: Arrays to keep until the device is done with this turn. CuPy's pool
                gives memory back to the stream it was allocated on, which may be
                another one and use it again at once.
        """
        with self._lock:
            # Another thread may have freed it since: kernels would get null pointers.
            self.check()
            self._release()
            _current_stream().wait_event(self._last)
            try:
                yield
            finally:
                # Also after an error: something may have been queued.
                self._last = _record(_current_stream())
                self._turns += 1
                if reads is not None:
                    self._read.append((self._last, reads))

    def _release(self) -> None:
        """Give up what the device has read. Needs the lock; waits for nothing."""
        while self._read and self._read[0][0].done:
            self._read.popleft()

    def submit(self, local_step: int, arrays: Any, launch: Any) -> DeviceReceipt:
        """Queue a gradient.

        Args:
            local_step: Of the gradient.
            arrays: Of the gradient.
            launch: Queues it, given where the device is to write the step met.
        """
        met = device.cupy().empty(1, np.int64)
        with self.turn(arrays):
            launch(met)
        # A turn that came in between only makes the receipt wait for that, too.
        return DeviceReceipt(local_step, met, self._last, self._looking)

    @contextlib.contextmanager
    def take(self, required: int, deadline: Deadline) -> Iterator[None]:
        """Wait for gradients; inside, the current stream has the turn.

        Raises:
            WaitTimeoutError: If they do not come in time.
        """
        deadline.wait(
            lambda: self._takes.acquire(blocking=False) or None,
            lambda: "a take of another thread",
        )
        try:
            self._wait(required, deadline)
            with self.turn():
                yield
        finally:
            self._takes.release()

    def _wait(self, required: int, deadline: Deadline) -> None:
        turns, look, header = -1, None, np.zeros(_WORDS, np.int64)
        # Whoever looks only once is told what is queued already, however long it takes.
        once = deadline.expired

        def enough() -> bool | None:
            nonlocal turns, look, header
            self.check()
            # The header only changes in turns.
            if look is None and turns != self._turns:
                turns, look = self._turns, self._look()
            if look is not None and (once or look.done):
                header, look = look.result(), None
            return bool(header[_COUNT] >= required) or None

        def missing() -> str:
            had = f"{required} gradients at step {header[_STEP]}, had {header[_COUNT]}"
            return had if look is None else f"{had}, but the device is still busy"

        deadline.wait(enough, missing)

    def _look(self) -> _Look:
        """Begin to copy the header as it is after all turns so far."""
        host = _pinned(_WORDS)
        with self._lock:
            self.check()
            self._release()
            self._looking.wait_event(self._last)
            self.header.get(stream=self._looking, out=host, blocking=False)
            # The next turn must not change what is being copied.
            self._last = _record(self._looking)
            look = _Look(host, self._last)
            # Whoever gives up leaves memory that the device has yet to write.
            self._looks = [each for each in self._looks if not each.done] + [look]
        return look

    def _words(self) -> list[int]:
        """Return the header as it is after all turns so far; waits for them."""
        return self._look().result().tolist()  # type: ignore[no-any-return]

    def count(self) -> int:
        """Return the number of gradients accumulated."""
        return self._words()[_COUNT]

    def step(self) -> int:
        """Return the step."""
        return self._words()[_STEP]

    def set_step(self, new: int) -> None:
        """Set the step, also to a lower one."""
        old = self.step()
        with self.turn():
            self.header[_STEP : _STEP + 1].fill(new)
        if new < old:
            logger.warning("%s: step lowered from %d to %d", self.what, old, new)

    def statistics(self) -> DeviceStatistics:
        """Return the numbers."""
        words = self._words()
        lags = {lag: number for lag, number in enumerate(words[_LAGS:]) if number}
        tally = Tally((words[_ACCEPTED],), (words[_DROPPED],), lags)
        return DeviceStatistics(words[_STEP], words[_COUNT], tally, self._nbytes)

    def describe(self) -> str:
        """Return step and count as text, for a ``repr``; never raises when freed."""
        if self._freed:
            return "freed"
        words = self._words()
        return f"step {words[_STEP]}, {words[_COUNT]} accumulated"

    def free(self) -> bool:
        """Wait until the device is done with it; return whether it was open before."""
        if self._freed:
            return False
        self._freed = True
        with self._lock:
            # Another stream may still use memory that the pool would give away at once.
            self._last.synchronize()
            self._read.clear()
            self._looks.clear()
            self.header = None
        return True


class AccumulatorOnDevice(Freeable):
    """What all accumulators on a device can be asked and told, beside gradients."""

    _rounds: DeviceRounds

    @property
    def global_step(self) -> int:
        """The accumulator's step, after all that was called before; waits for that."""
        self._rounds.check()
        return self._rounds.step()

    def num_accumulated(self) -> int:
        """Return how many gradients no take has handed out yet.

        Waits until the device is done with all that was called before.
        """
        self._rounds.check()
        return self._rounds.count()

    def set_global_step(self, new_global_step: Any) -> None:
        """Set the step, also to a lower one; gradients accumulated stay.

        Raises:
            InvalidArgumentError: If it is not one number.
        """
        self._rounds.check()
        self._rounds.set_step(step_number(new_global_step, "new_global_step"))

    def statistics(self) -> DeviceStatistics:
        """Return the numbers; waits as `num_accumulated` does."""
        self._rounds.check()
        return self._rounds.statistics()


class _Look(NamedTuple):
    """Words on their way to the host."""

    host: np.ndarray[Any, Any]
    event: Any

    @property
    def done(self) -> bool:
        """Whether they are there."""
        return bool(self.event.done)

    def result(self) -> np.ndarray[Any, Any]:
        """Wait for them."""
        self.event.synchronize()
        return self.host


def _record(stream: Any) -> Any:
    """Return an event at which the device is done with what is queued on a stream."""
    event = device.cupy().cuda.Event(disable_timing=True)
    stream.record(event)
    return event


def _current_stream() -> Any:
    return device.cupy().cuda.get_current_stream()


def _pinned(words: int) -> np.ndarray[Any, Any]:
    """Return memory to which the device copies while the host goes on."""
    memory = device.cupy().cuda.alloc_pinned_memory(words * 8)
    return np.frombuffer(memory, np.int64, words)
