"""Admission of gradients on a device, their counts, and the order of launches.

An accumulator on a device belongs to one process, whose threads change it in turn. So
the host decides which gradients are stale and passes the rest to kernels by value:
there are no counters on the device, and no call waits for the device.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from hpcaccum import device
from hpcaccum.accumulator.receipts import MAX_LAG, Receipt, Tally
from hpcaccum.accumulator.state import admits
from hpcaccum.accumulator.turns import OneThread
from hpcaccum.arguments import positive_count, step_number
from hpcaccum.deadline import Deadline
from hpcaccum.mpi import Freeable

logger = logging.getLogger("hpcaccum")


@dataclass(frozen=True)
class DeviceStatistics:
    """The state of an accumulator on a device at one moment.

    Attributes:
        global_step: The step.
        num_accumulated: Gradients that no take has returned yet.
        weight: Sum of their weights.
        tally: Gradients accepted and dropped so far, and their lags.
        nbytes: Bytes of device memory that the sum occupies.
    """

    global_step: int
    num_accumulated: int
    weight: float
    tally: Tally
    nbytes: int


class _State(NamedTuple):
    """Step and counters; replaced as a whole, so that they always agree."""

    step: int = 0
    accumulated: int = 0
    accepted: int = 0
    dropped: int = 0
    lags: tuple[int, ...] = (0,) * (MAX_LAG + 1)
    weight: float = 0.0

    def after(self, receipt: Receipt, weight: float) -> _State:
        """Return the state after one more gradient."""
        lag, lags = min(max(receipt.lag, 0), MAX_LAG), list(self.lags)
        lags[lag] += 1
        step, accumulated, accepted, dropped, _, total = self
        if receipt:
            accumulated, accepted, total = accumulated + 1, accepted + 1, total + weight
        else:
            dropped += 1
        return _State(step, accumulated, accepted, dropped, tuple(lags), total)


class AccumulatorOnDevice(Freeable):
    """Step, counters and order of launches of an accumulator on the current device.

    Any thread may call. All launches of one call follow those of the call before, also
    on different streams.
    """

    def __init__(self, name: str, nbytes: int) -> None:
        self._name, self._nbytes = name, nbytes
        self._device = device.current_device()
        self._calls = OneThread(name)
        # Held by the take that waits or reduces.
        self._taking = OneThread(name, "a take of another thread")
        self._state = _State()
        # The event after each turn, and the arrays that it reads or None, oldest first.
        self._reads: deque[tuple[Any, Any]] = deque()
        self._last = device.new_event()
        device.current_stream().record(self._last)

    @property
    def name(self) -> str:
        """The name given at construction."""
        return self._name

    @property
    def global_step(self) -> int:
        """The accumulator's step."""
        self._check_open()
        return self._state.step

    def num_accumulated(self) -> int:
        """Return how many gradients no take has returned yet."""
        self._check_open()
        return self._state.accumulated

    def statistics(self) -> DeviceStatistics:
        """Return step and counters."""
        self._check_open()
        state = self._state
        lags = {lag: number for lag, number in enumerate(state.lags) if number}
        tally = Tally((state.accepted,), (state.dropped,), lags)
        numbers = state.step, state.accumulated, state.weight
        return DeviceStatistics(*numbers, tally, self._nbytes)

    def set_global_step(self, new_global_step: Any) -> None:
        """Set the step, also to a lower one; accumulated gradients stay.

        Raises:
            InvalidArgumentError: If it is not one number.
        """
        self._check_open()
        new = step_number(new_global_step, "new_global_step")
        with self._calls.hold("set_global_step"):
            self._check_open()
            old = self._state.step
            self._state = self._state._replace(step=new)
        if new < old:
            logger.warning("%s: step lowered from %d to %d", self._name, old, new)

    def _numbers(self) -> str:
        """Return step and count as text, for a ``repr``."""
        if self.freed:
            return "freed"
        return f"step {self._state.step}, {self._state.accumulated} accumulated"

    def _submit(
        self, local_step: int, weight: float, arrays: Any, factor: Any
    ) -> Receipt:
        """Queue the addition of a gradient, unless it is stale."""
        with self._calls.hold("apply_grad"):
            self._check_here()
            state = self._state
            accepted = bool(admits(state.step, local_step))
            receipt = Receipt(accepted, local_step, state.step)
            if receipt:
                first = state.accumulated == 0
                self._in_turn(arrays, self._add, arrays, factor, first)
            self._state = state.after(receipt, weight)
            return receipt

    def _add(self, arrays: Any, factor: Any, first: bool) -> None:
        """Queue the addition of a gradient, which may be the first of a round."""
        raise NotImplementedError

    def _take(
        self, num_required: Any, timeout: float | None, targets: Any = None
    ) -> Any:
        """Wait for gradients; return what `_reduce` returns for their weight."""

        def enough() -> bool | None:
            self._check_open()
            return self._state.accumulated >= required or None

        def missing() -> str:
            step, had, *_ = self._state
            return f"{required} gradients at step {step}, had {had}"

        required = positive_count(num_required, "num_required")
        deadline = Deadline(timeout, f"{self._name}: take_grad({required})")
        with self._taking.hold("take_grad", deadline):
            deadline.wait(enough, missing)
            with self._calls.hold("take_grad"):
                self._check_here()
                return self._in_turn(None, self._reduce, self._state.weight, targets)

    def _reduce(self, weight: float, targets: Any) -> Any:
        """Queue the reduction; call `_begin_step` as soon as that has the sum."""
        raise NotImplementedError

    def _begin_step(self) -> None:
        """Count the step."""
        state = self._state
        step = state.step + 1
        self._state = state._replace(step=step, accumulated=0, weight=0.0)

    def _in_turn(self, reads: Any, work: Callable[..., Any], *args: Any) -> Any:
        """Queue work on the current stream, after that of all turns before."""
        event = None
        while self._reads and self._reads[0][0].done:
            # Recorded again below, after the wait for `_last`, which it may be.
            event, _ = self._reads.popleft()
        stream = device.current_stream()
        stream.wait_event(self._last)
        try:
            return work(*args)
        finally:
            # Also after an error: something may have been queued.
            self._last = device.new_event() if event is None else event
            stream.record(self._last)
            self._reads.append((self._last, reads))

    def _check_here(self) -> None:
        """Raise unless this is open, and its device is the current one."""
        self._check_open()
        device.check_current(self._name, self._device)

    def _describe(self) -> str:
        return f"accumulator {self._name!r}"

    def _free(self) -> None:
        with self._calls.hold("free"):
            # The pool would give the memory away while another stream still uses it.
            self._last.synchronize()
            # Before the turn is over: a waiting thread must not launch kernels.
            self._freed = True
            self._reads.clear()
            self._clear()

    def _clear(self) -> None:
        """Drop all arrays on the device."""
        raise NotImplementedError
