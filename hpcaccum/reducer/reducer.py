"""Reducer: the mean or sum of named arrays over a group of ranks."""

from __future__ import annotations

import threading
import time
import types
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from hpcaccum.arguments import bucket_size, converted, one_of, step_number, wire_format
from hpcaccum.deadline import Deadline
from hpcaccum.device import is_device
from hpcaccum.errors import (
    FreedError,
    InvalidArgumentError,
    WaitTimeoutError,
    format_ranks,
)
from hpcaccum.mpi import Freeable, Group, Opened
from hpcaccum.reducer.arrivals import Arrivals
from hpcaccum.reducer.call import NOTHING, SIGNATURES, Call
from hpcaccum.reducer.device import DeviceExchange, check_direct
from hpcaccum.reducer.inputs import Inputs
from hpcaccum.reducer.schedules import Readiness
from hpcaccum.reducer.selection import SCHEDULES, choose, make
from hpcaccum.reducer.statistics import ReducerStatistics

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from mpi4py import MPI as mpi4py_MPI

    from hpcaccum.layout import Layout

Array = np.ndarray[Any, Any]

REDUCTIONS = ("MEAN", "SUM")

# The signature of a rank that takes part only to raise, and a prime for the others:
# the call's number, the step and what is present, in one number. Two calls that differ
# have the same one once in 10**7 times.
_FAILED, _PRIME = 0, SIGNATURES - 3


class Reducer(Freeable):
    """Reduces arrays of one layout over a group, again and again. Collective.

    Gradients that are written to `arrays` are not copied, and the results are read
    where they lie:

        grads = reducer.arrays()
        grads["w"][...] = ...
        means = reducer.reduce()

    Arrays from elsewhere are copied in, and on demand out: ``reduce(mine, out=mine)``.
    Or one by one, while others are still computed: ``start("w")`` for each, in any
    order, and ``wait()`` once; `start` never waits.

    | schedule | the ranks | how | same ranks, same bits |
    |---|---|---|---|
    | ``"shared"`` | on one node | each sums a stripe of all | in order |
    | ``"hierarchical"`` | anywhere | so in each node, then between nodes | in order |
    | ``"flat"`` | anywhere | the MPI library's allreduce | no promise |

    ``"auto"`` is shared on one node; else hierarchical where a node has several ranks
    and the arrays 512 KiB or more, and for ``wire_dtype``; else flat. The mean is the
    sum divided once. Half precision is summed in float32, and results are float32
    then. MPI only recommends that its allreduce give the same bits (MPI-4.1, 6.9.1).

    Arrays of a CUDA device (CuPy's) are brought and taken in the same way, all of one
    call: ``reduce(mine, out=mine)``. They are copied out, reduced and copied back in a
    pipeline of buckets. MPI gets device memory only where ``cuda_aware=True`` says so.

    What a plain allreduce leaves to luck is checked in every call: that all ranks bring
    the same arrays, reduce them in the same way, have begun the same number of calls,
    and pass the same ``step``. Calls are paired in their order. A call that a rank
    began and did not make, as an exception such as KeyboardInterrupt came first, is
    found in its next one. A call that it never began can only be found by ``step``: a
    count that the rank also raises when it skips a call. Without, the next calls of the
    rank are paired with earlier ones of the others. When those wait in vain for a last
    one, and the rank waits in another collective call, it is an error on both.

    Args:
        layout: The arrays.
        group: The ranks: a `Group`, a communicator, or None for COMM_WORLD.
        name: For messages.
        reduction_type: ``"MEAN"`` or ``"SUM"``.
        schedule: One of the table.
        wire_dtype: A narrower dtype, such as ``"float16"`` or ``"bfloat16"``, in which
            sums travel between nodes; they are formed in the wide one.
        bucket_bytes: Of the pieces that travel, at most; None suits the schedule.
        cuda_aware: Whether MPI is given device memory, with schedule ``"flat"``: when
            all ranks are there, by blocking calls, which have no timeout.

    Raises:
        TypeError, InvalidArgumentError, DisagreementError: On every rank.
    """

    def __init__(
        self,
        layout: Layout,
        group: Group | mpi4py_MPI.Comm | None = None,
        name: str = "reducer",
        *,
        reduction_type: str = "MEAN",
        schedule: str = "auto",
        wire_dtype: Any = None,
        bucket_bytes: int | None = None,
        cuda_aware: bool = False,
    ) -> None:
        self._group, self._name = Group.of(group), name
        self._wire: np.dtype[Any] | None = None

        def facts() -> dict[str, object]:
            one_of("reduction_type", reduction_type, REDUCTIONS)
            one_of("schedule", schedule, SCHEDULES)
            self._wire = wire_format(wire_dtype, layout.dtype)
            if self._wire is not None and schedule == "flat":
                raise InvalidArgumentError(
                    "wire_dtype is for schedule 'auto' or 'hierarchical', not 'flat'"
                )
            check_direct(cuda_aware, schedule)
            return {
                "names, shapes and dtype": layout.fingerprint,
                "reduction_type": reduction_type,
                "schedule": schedule,
                "wire_dtype": str(self._wire),
                "bucket_bytes": bucket_size(bucket_bytes),
                "cuda_aware": bool(cuda_aware),
            }

        self._group.agree(name, facts)
        self._mask = self._begun = 0
        self.waited, self._given_up = 0.0, False
        self._nodes = self._group.comm.allreduce(int(self._group.node.rank == 0))
        self._kind = choose(
            schedule,
            self._group,
            self._nodes,
            layout.nbytes,
            wired=self._wire is not None,
        )
        self._schedule, buckets = make(
            self._kind,
            self._group,
            layout,
            bucket_bytes,
            self._wire,
            cuda_aware=bool(cuda_aware),
        )
        self._divisors = {"MEAN": self._group.size, "SUM": 1}
        self._reduction_type = reduction_type
        self._set_divisor(None)
        self._arrays, self._buckets = self._schedule.arrays, len(buckets)
        self._device = DeviceExchange(layout, self._schedule, buckets, bool(cuda_aware))
        views = {name: array.view() for name, array in self._schedule.results.items()}
        for view in views.values():
            view.flags.writeable = False
        self._results: Mapping[str, Array] = types.MappingProxyType(views)
        self._named = Inputs(name, self._arrays, self._schedule.received)
        self._readiness = Readiness(layout, buckets)
        self._open()

    def _set_divisor(self, reduction_type: str | None) -> None:
        if reduction_type is None:
            reduction_type = self._reduction_type
        elif reduction_type not in self._divisors:
            one_of("reduction_type", reduction_type, REDUCTIONS)
        self._schedule.divisor = self._divisors[reduction_type]
        if self._mask and reduction_type != self._reduction_type:
            raise InvalidArgumentError(
                f"{self._name}: what was started is reduced by {self._reduction_type}, "
                f"not by {reduction_type}"
            )

    def _open(self) -> None:
        # Who is late, unless the schedule tells.
        self._roll_call: Arrivals | None = None
        if self._schedule.late() is None:
            self._roll_call = Arrivals(self._group)
        self._opened = Opened(self._group, self._free, self._name)
        # The order of this reducer's calls among the other calls of the ranks.
        self._track = self._group.control.open_track(f"{self._opened.label}: reduction")

    def arrays(self) -> dict[str, Array]:
        """Return this rank's arrays, of the layout's dtype: write gradients there.

        They keep what is written to them until a call copies others in.
        """
        return dict(self._arrays)

    def results(self) -> Mapping[str, Array]:
        """Return where results lie, read-only and of the wide dtype.

        Good until this rank's next `start` or `reduce`; `numpy.copy` what must last.
        """
        return self._results

    def reduce(
        self,
        arrays: Mapping[str, Any] | None = None,
        *,
        out: Mapping[str, Array] | None = None,
        step: int = 0,
        reduction_type: str | None = None,
    ) -> Mapping[str, Array]:
        """Reduce arrays over the ranks. Collective.

        Args:
            arrays: Copied in first, unless it is the reducer's own; names that are
                missing are brought by nobody. None: all, as they lie in `arrays`.
            out: Arrays to copy results to, by name, of any float dtype; may be what is
                brought, or lie in `arrays`, but not in each other or in `results`.
            step: What this rank is at, by a count that it also raises when it skips a
                call; nothing else finds that in this call.
            reduction_type: Of this call, if nothing was started; or the reducer's.

        Returns:
            The results of what was brought, where they lie; see `results`. Or ``out``,
            if on the device: then they are queued on the current stream.

        Raises:
            DisagreementError: On every rank, if ranks bring different arrays, are at
                different steps or have begun different numbers of calls; results and
                ``out`` are then without meaning.
            InvalidArgumentError: On every rank, for an array that does not fit.
            Exception: On every rank, if one came with `fail`.
            WaitTimeoutError: After HPCACCUM_TIMEOUT seconds; names who did not come.
                The reducer is then of no further use: others may work in its memory.
        """
        self._begin()
        try:
            self._set_divisor(reduction_type)
            step = step_number(step, "step")
            brought, mask = NOTHING, self._named.all
            if arrays is not None:
                brought, mask = self._named.brought(arrays, self._mask)
            targets = self._named.targets(out, mask | self._mask) if out else NOTHING
            self._device.prepare(brought, targets)
        except Exception as error:
            self._fail(error)
        return self._finish(brought, mask, targets, step)

    def start(self, name: str, array: Any = None) -> None:
        """Say that an array is ready; never waits.

        An array on a device is queued, and may be deleted at once; a later `start` or
        `wait` finds that it is there. (Where host memory cannot be pinned, it waits.)

        Args:
            name: Of the array; ranks may start theirs in any order.
            array: Copied in; None if it lies in `arrays` already.

        Raises:
            InvalidArgumentError, DeviceUnavailableError: On this rank, if the name is
                unknown or started already, or for an unusable array or device.
        """
        self._check_open()
        self._set_divisor(None)
        given = {name: self._arrays.get(name) if array is None else array}
        brought, bit = self._named.brought(given, self._mask)
        complete = self._device.start(name, brought)
        self._mask |= bit
        for each in complete:
            self._schedule.offer(self._readiness.add(each))

    def wait(
        self, *, out: Mapping[str, Array] | None = None, step: int = 0
    ) -> Mapping[str, Array]:
        """Wait for what was started; arguments, result and errors of `reduce`."""
        self._begin()
        try:
            targets = self._named.targets(out, self._mask) if out else NOTHING
            step = step_number(step, "step")
            self._device.prepare(NOTHING, targets)
        except Exception as error:
            self._fail(error)
        self._set_divisor(None)
        return self._finish({}, self._mask, targets, step)

    def fail(self, error: Exception) -> NoReturn:
        """Take part in a call only to raise ``error`` on every rank. Collective.

        For a rank that finds out alone that it has nothing to bring, while the others
        wait for it.
        """
        self._begin()
        self._fail(error)

    def _fail(self, error: Exception) -> NoReturn:
        self._exchange(Call(_FAILED, self._wait, {}, False, {}))
        self._explain(0, 0, error)
        raise error

    def _begin(self) -> None:
        self._check_open()
        # Before anything that may be interrupted.
        self._begun += 1

    @property
    def _calls(self) -> int:
        """Reductions that are complete."""
        return self._track.calls

    def _check_open(self) -> None:
        if self._opened.closed:
            raise FreedError(f"{self._name} was freed")
        if self._given_up:
            raise WaitTimeoutError(
                f"{self._name}: reduction {self._calls + 1} was given up, and ranks "
                f"cannot be in step again; start anew"
            )

    def _finish(
        self,
        brought: Mapping[str, Array],
        mask: int,
        out: Mapping[str, Array],
        step: int,
    ) -> Mapping[str, Array]:
        mask |= self._mask
        facts = (step * 1_000_003 + mask) * 2_097_143 + self._schedule.divisor
        facts += self._begun * 9_576_899
        signature = facts % _PRIME + 1
        whole = len(brought) == len(self._arrays)
        exact = self._named.exact(out) if out else NOTHING
        if not self._exchange(Call(signature, self._wait, brought, whole, exact)):
            self._explain(mask, step, None)
        if len(exact) < len(out):
            for name in out.keys() - exact.keys():
                out[name][...] = converted(self._results[name], out[name].dtype)
        if out and is_device(next(iter(out.values()))):
            return out
        if mask == self._named.all:
            return self._results
        return {name: self._results[name] for name in self._named.names(mask)}

    def _exchange(self, call: Call) -> bool:
        """Make one call; return whether all ranks made the same one."""
        begun, self._track.thread = time.monotonic(), threading.get_ident()
        # Until proved otherwise: others may go on working in this rank's memory.
        self._given_up = True
        self._device.settle()
        agreed = self._device.finish(call)
        self._given_up = False
        self._track.calls += 1
        if self._mask:
            self._mask = 0
            self._readiness.reset()
        self.waited += time.monotonic() - begun
        return agreed

    def _wait(self, ready: Callable[[], bool]) -> None:
        deadline = Deadline(None, f"{self._name}: reduction {self._calls + 1}")

        def look() -> bool | None:
            if self._roll_call is not None:
                self._roll_call.attend(self._calls + 1, deadline)
            if ready():
                return True
            self._group.control.check(self._track, deadline)
            return None

        try:
            deadline.wait(look, self._missing)
        except BaseException:
            self._group.control.depart(self._track)
            raise

    def _missing(self) -> str:
        late = self._schedule.late()
        if self._roll_call is not None:
            late = self._roll_call.missing(self._calls + 1)
        return f"{format_ranks(late or [])} of {self._group.size} to make the same call"

    def _explain(self, mask: int, step: int, error: Exception | None) -> NoReturn:
        """Raise on every rank what is wrong on one, or between them. Collective."""
        there = self._named.names(mask)
        facts = {
            "number of calls begun": str(self._begun),
            "step": str(step),
            "divisor": str(self._schedule.divisor),
        }
        # All ranks come here in one call: from now on they count alike again.
        self._begun = self._calls
        for name in self._arrays:
            facts[f"gradient of {name}"] = "one" if name in there else "none"
        reports = self._group.raise_together(self._name, error, facts)
        self._group.compare(self._name, reports)
        raise RuntimeError(f"{self._name}: ranks differ, but in nothing known")

    def statistics(self) -> ReducerStatistics:
        """Return the numbers."""
        group, wire = self._group, self._wire
        return ReducerStatistics(
            schedule=self._kind,
            ranks=group.size,
            nodes=self._nodes,
            buckets=self._buckets,
            wire_dtype=None if wire is None or self._nodes == 1 else str(wire),
            calls=self._calls,
            waited=self.waited,
            window_bytes=self._schedule.window_bytes,
            result_bytes=self._schedule.result_bytes,
        )

    def __repr__(self) -> str:
        """Show the numbers."""
        return f"<Reducer {self._name!r}, {self._kind}: {self._calls} calls>"

    def free(self) -> None:
        """Free windows and communicators. Collective.

        Arrays that were given out keep what they hold, and their memory. Calling it
        again does nothing.
        """
        self._opened.close()

    def _free(self) -> None:
        given_up = self._group.allgather(self._given_up, f"{self._opened.label}: free")
        self._group.control.close_track(self._track)
        # Memory lives as long as anything refers to it.
        self._arrays, self._results = {}, {}
        self._named.free()
        self._device.free()
        if self._roll_call is not None:
            self._roll_call.free()
        self._schedule.free(abandoned=any(given_up))
