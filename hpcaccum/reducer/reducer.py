"""Reducer: the mean or sum of named arrays over a group of ranks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from hpcaccum.arguments import (
    REDUCTIONS,
    converted,
    one_of,
    positive_weight,
    step_number,
)
from hpcaccum.deadline import Deadline
from hpcaccum.device import is_device
from hpcaccum.dtypes import Array
from hpcaccum.errors import BrokenObjectError, InvalidArgumentError, format_ranks
from hpcaccum.layout import Layout
from hpcaccum.mpi import Freeable, Group, group_of
from hpcaccum.overlap import overlap
from hpcaccum.reducer import selection
from hpcaccum.reducer.device import DeviceCalls, DeviceOnlyCalls
from hpcaccum.reducer.inputs import Inputs
from hpcaccum.reducer.schedule import Call, SpinWait
from hpcaccum.reducer.signature import FAILED, Interruption, canonical, digest
from hpcaccum.spans import traced

if TYPE_CHECKING:
    from mpi4py import MPI as mpi4py_MPI

_NOTHING: Mapping[str, Any] = {}


@dataclass(frozen=True)
class ReducerStatistics:
    """What a reducer uses and has done.

    Attributes:
        schedule: The schedule in use; never ``"auto"``.
        ranks, nodes: Size of the group.
        buckets: Number of pieces in which data travel.
        wire_dtype: Dtype in which sums travel between nodes; None if it is theirs.
        calls: Complete reductions.
        waited: Seconds that this rank has spent in them.
        window_bytes: Bytes of this rank's gradients.
        result_bytes: Bytes of the results in this rank's memory. On a node that shares
            them, they are counted on its first rank.
    """

    schedule: str
    ranks: int
    nodes: int
    buckets: int
    wire_dtype: str | None
    calls: int
    waited: float
    window_bytes: int
    result_bytes: int


class Reducer(Freeable):
    """Reduces arrays of one layout over a group, in any number of calls. Collective.

    Gradients that are written to `arrays` are not copied, and results are read in
    place:

        grads = reducer.arrays()
        grads["w"][...] = ...
        means = reducer.reduce()

    Other arrays are copied in, and out on request: ``reduce(mine, out=mine)``. To
    overlap the reduction with the computation of gradients, call ``start("w")`` for
    each array as it is ready, in any order, and then ``wait()`` once. `start` never
    waits.

    | schedule | the ranks | how | same ranks, same bits |
    |---|---|---|---|
    | ``"shared"`` | on one node | each sums a stripe of all | in order |
    | ``"hierarchical"`` | anywhere | the same per node, then between nodes | in order |
    | ``"flat"`` | anywhere | the MPI library's allreduce | no guarantee |
    | the same, to 64 KiB | anywhere | by messages between pairs of ranks | in order |
    | ``"nccl"`` | on one node, a GPU each | NCCL's allreduce | no guarantee |

    ``"auto"`` selects ``"shared"`` if all ranks are on one node. Otherwise it selects
    ``"hierarchical"`` if a node has several ranks and the arrays have 512 KiB or more,
    or if ``wire_dtype`` is set; else ``"flat"``. MPI only recommends that its allreduce
    return the same bits in each call (MPI-4.1, 6.9.1).

    The mean is the sum, divided once. Half precision is summed in float32, and its
    results are float32.

    Arrays on a CUDA device (CuPy's) are passed in the same way, either all arrays of a
    call or none. They are copied to CPU memory, reduced and copied back in a pipeline
    of buckets. MPI is given device memory only if ``cuda_aware=True``.

    With ``"nccl"``, gradients never enter CPU memory, and arrays in CPU memory raise an
    error. Half precision is sent in float32, too. ``"auto"`` never selects it, because
    it has run on a simulated device only. NCCL is called when all ranks have arrived
    and agree about the call. If it fails on one rank, all ranks get an error, and the
    reducer is unusable. Select the device of each rank first.

    Calls of different ranks are paired in their order. Each call checks that all ranks

    - contribute the same arrays,
    - reduce them in the same way,
    - pass the same ``step``,
    - and have the same numbers in `compare`.

    A call that a rank skips can only be detected by ``step``: a count that the rank
    also increases when it skips a call. Without it, later calls of that rank are paired
    with earlier calls of the others, and at the end the others wait for a call that the
    rank never makes. They get an error if that rank waits in another collective call.

    If an exception such as a timeout or KeyboardInterrupt ends a call on this rank
    before all ranks have made it, every later call raises BrokenObjectError on this
    rank: others may still use its memory. They get an error if it waits in another
    collective call, such as `free`.

    Args:
        layout: Of the arrays.
        comm: The ranks: a communicator, a `Group`, or None for COMM_WORLD.
        name: Begins messages.
        reduction_type: ``"MEAN"`` or ``"SUM"``.
        schedule: A name in the table, or ``"auto"``.
        wire_dtype: A narrower dtype, such as ``"float16"`` or ``"bfloat16"``, in which
            sums are sent between nodes. They are computed in the wider dtype.
        bucket_bytes: Largest size of the pieces in which data are sent; None selects
            the schedule's default.
        cuda_aware: Whether MPI is given device memory. Requires schedule ``"flat"``,
            which then makes blocking calls, without a timeout, after all ranks have
            arrived.
        on_loss: What happens when a rank is lost: "raise" has all others end with a
            LostRankError. With "shrink" they go on, if the process of the rank has
            ended, and it is not rank 0: a mean is then that over the ranks that remain.
            The arrays of the lost rank count in a call if all of them were there.
            Requires all ranks on one node, and schedule "auto" or "shared".
        group: An earlier name of ``comm``.

    Attributes:
        label: The name, with a number that is unique in the group.
        waited: Seconds that this rank has spent in calls.
        broken: Whether an exception has ended a call, so that no other can be made.

    Raises:
        TypeError, InvalidArgumentError, DisagreementError: On every rank.
        DeviceUnavailableError, RuntimeError: On every rank, with schedule ``"nccl"``,
            if a rank has no device or no NCCL, or NCCL fails.
    """

    def __init__(
        self,
        layout: Layout,
        comm: mpi4py_MPI.Comm | Group | None = None,
        name: str = "reducer",
        *,
        reduction_type: str = "MEAN",
        schedule: str = "auto",
        wire_dtype: Any = None,
        bucket_bytes: int | None = None,
        cuda_aware: bool = False,
        on_loss: str = selection.RAISE,
        group: mpi4py_MPI.Comm | Group | None = None,
    ) -> None:
        self._group, self._name = group_of(comm if group is None else group), name
        given = selection.Options(
            reduction_type, schedule, wire_dtype, bucket_bytes, cuda_aware, on_loss
        )
        options = self._group.agree(
            name,
            lambda: given.checked(layout, self._group),
            lambda found: found.facts(layout),
        )
        self._options = options
        self._reduction_type = options.reduction_type
        # What `_digest` was made of, beside the numbers to compare.
        self._digested: tuple[int, bool] | None
        self.compare(_NOTHING)
        self.waited, self.broken = 0.0, False
        wait = SpinWait(self._group, self._wait)
        made = selection.make(options, self._group, layout, wait)
        self._schedule = made
        only = made.name if made.device_only else None
        self._inputs = Inputs(name, made.arrays, made.received, only)
        # The set of arrays that were started since the last call.
        self._started = 0
        # Whether no array of a call with started ones is in place, or shares memory
        # with this object: `start` then multiplies them by the weight, too.
        self.copies_all = False
        calls = DeviceOnlyCalls if made.device_only else DeviceCalls
        self._device = calls(layout, made)
        label = self._group.label(name)
        # Orders the calls among the other collective calls of the group.
        self._track = self._group.control.open_track(f"{label}: reduction")
        self._register(self._group, label)

    def _prepare(self, reduction_type: str | None, weight: Any) -> None:
        """Set the kind of reduction and the weight of a call, if they are right."""
        if reduction_type is None:
            reduction_type = self._reduction_type
        elif reduction_type not in REDUCTIONS:
            one_of("reduction_type", reduction_type, REDUCTIONS)
        if weight != self._schedule.weight or type(weight) is not float:
            weight = positive_weight(weight, self._schedule.received.dtype)
        if self._started and reduction_type != self._reduction_type:
            raise InvalidArgumentError(
                f"{self._name}: arrays were started to be reduced by "
                f"{self._reduction_type}, not by {reduction_type}"
            )
        if self._started and weight != self._schedule.weight:
            raise InvalidArgumentError(
                f"{self._name}: arrays were started with weight "
                f"{self._schedule.weight}, not {weight}"
            )
        schedule, mean = self._schedule, reduction_type == "MEAN"
        if weight != schedule.weight or mean != schedule.mean:
            schedule.prepare(weight, mean=mean, scales=False)

    def _choose_factor(self, inputs: Mapping[str, Any], names: int) -> None:
        """Decide whether this call's weight multiplies arrays as they are copied."""
        # That costs no time. The sum multiplies arrays in place, on a device, or in
        # half precision.
        schedule = self._schedule
        if schedule.weight == 1 or self._started:
            return
        sent = schedule.sent
        scales = sent.dtype == schedule.received.dtype
        scales = scales and len(inputs) == names.bit_count() > 0
        scales = scales and not any(
            is_device(array) or overlap(array, sent) for array in inputs.values()
        )
        if scales != (schedule.scale != 1):
            schedule.prepare(schedule.weight, mean=schedule.mean, scales=scales)

    def arrays(self) -> dict[str, Array]:
        """Return this rank's arrays, of the layout's dtype, to write gradients to.

        They keep what is written to them until a call copies other arrays in, which it
        may multiply by its weight.
        """
        return dict(self._schedule.arrays)

    def results(self) -> Mapping[str, Array]:
        """Return the results in place, read-only and of the dtype of sums.

        Valid until this rank's next `start` or `reduce`; copy what must last longer.
        """
        return self._schedule.results

    @traced("reduce", lambda args, _: {"call": args[0].calls})
    def reduce(
        self,
        arrays: Mapping[str, Any] | None = None,
        *,
        out: Mapping[str, Array] | None = None,
        step: int = 0,
        reduction_type: str | None = None,
        weight: float = 1.0,
    ) -> Mapping[str, Array]:
        """Reduce arrays over the ranks. Collective.

        Args:
            arrays: Inputs, by name. They are copied in, except the reducer's own
                arrays. Names that are missing here must be missing on all ranks. None:
                all of `arrays`, in place.
            out: Arrays to copy results to, by name, of any float dtype. They may be
                inputs or share memory with `arrays`, but not with each other or with
                `results`.
            step: This rank's count of calls, which it also increases when it skips a
                call; nothing else detects a skipped call.
            reduction_type: For this call, if no array was started; None is the
                reducer's.
            weight: Of this rank's arrays, such as the number of samples that they come
                from; each rank has its own. It multiplies them while they are copied,
                or in the sum. A mean is divided by the sum of all weights. It must be
                that of `start`.

        Returns:
            The results of this call, in place; see `results`. Or ``out``, if it is on
            the device: the results are then queued on the current stream.

        Raises:
            DisagreementError: On every rank, if ranks contribute different arrays, are
                at different steps or have begun different numbers of calls. Results and
                ``out`` are then undefined.
            InvalidArgumentError: On every rank, if an array does not fit.
            Exception: On every rank, if one called `fail`. On the others it is a
                RuntimeError that names this rank, unless the error was a TypeError, or
                an argument or device error of hpcaccum.
            Interruption: On every rank, if one called `interrupt`; or if one is lost
                that has made another call.
            WaitTimeoutError: After HPCACCUM_TIMEOUT seconds; names the missing ranks.
            BrokenObjectError: If an exception, such as a timeout, has ended an earlier
                call.
        """
        self._begin()
        try:
            self._prepare(reduction_type, weight)
            step = step_number(step, "step")
            if arrays is None:
                inputs, names = _NOTHING, self._inputs.in_place()
            else:
                inputs, names = self._inputs.check(arrays, self._started)
            targets = _NOTHING
            if out:
                targets = self._inputs.targets(out, names | self._started)
            self._choose_factor(inputs, names)
            self._device.prepare(inputs, targets)
        except Exception as error:
            self._fail(error)
        return self._finish(inputs, names, targets, step)

    @traced("reduce", lambda args, _: {"array": args[1]})
    def start(self, name: str, array: Any = None, *, weight: float = 1.0) -> None:
        """Begin to reduce an array that is ready; never waits.

        The copy of a device array is queued, and the array may be deleted at once. A
        later `start` or `wait` notices that the copy is complete. (If CPU memory cannot
        be pinned, this waits for the copy.)

        Args:
            name: Of the array. Each rank may start its arrays in another order.
            array: Copied in; None if it is in `arrays` already.
            weight: As for `reduce`; the same for all arrays of a call.

        Raises:
            InvalidArgumentError, DeviceUnavailableError: On this rank, if the name is
                unknown or started already, or weight, array or device is unusable.
        """
        self._check_open()
        self._prepare(None, weight)
        given = {name: self._schedule.arrays.get(name) if array is None else array}
        inputs, bit = self._inputs.check(given, self._started)
        self._choose_factor(inputs if self.copies_all else _NOTHING, bit)
        self._device.prepare(inputs, _NOTHING)
        self.broken = True
        for each in self._device.start(name, inputs):
            self._schedule.add(each)
        self._started |= bit
        self.broken = False

    def wait(
        self,
        *,
        out: Mapping[str, Array] | None = None,
        step: int = 0,
        weight: float = 1.0,
    ) -> Mapping[str, Array]:
        """Wait for the started arrays. Collective.

        Arguments, result and errors are those of `reduce`.
        """
        return self.reduce(_NOTHING, out=out, step=step, weight=weight)

    def fail(self, error: Exception) -> NoReturn:
        """Take part in a call only to raise ``error`` on every rank. Collective.

        For a rank that cannot contribute, while the others wait for it.
        """
        self._begin()
        self._fail(error)

    def interrupt(self, note: object) -> NoReturn:
        """Take part in a call only to raise `Interruption` on every rank. Collective.

        The reducer and the inputs of the other ranks are as before the call.

        Args:
            note: For the other ranks; not None.
        """
        self._begin()
        self._fail(None, note)

    def _fail(self, error: Exception | None, note: object = None) -> NoReturn:
        self._exchange(Call(FAILED, _NOTHING, _NOTHING))
        self._explain(0, 0, error, note)

    def _begin(self) -> None:
        self._check_open()
        # Until all ranks have made the call: if an exception ends it here, others may
        # continue to use this rank's memory.
        self.broken = True

    def _check_open(self) -> None:
        if self._freed or self.broken:
            super()._check_open()
            raise BrokenObjectError(
                f"{self._next()} was ended by an exception, and other ranks may still "
                f"wait in it; make a new reducer"
            )

    def _next(self) -> str:
        """Name the call that comes next."""
        return f"{self._name}: reduction {self.calls + 1}"

    def _finish(
        self,
        inputs: Mapping[str, Array],
        names: int,
        out: Mapping[str, Array],
        step: int,
    ) -> Mapping[str, Array]:
        """Make a call with checked arguments; return what `reduce` returns."""
        names |= self._started
        mine = self._signature(names, step)
        exact = self._inputs.exact(out) if out else _NOTHING
        if not self._exchange(Call(mine, inputs, exact)):
            self._explain(names, step, self._schedule.failure)
        results = self._schedule.results
        if len(exact) < len(out):
            for name in out.keys() - exact.keys():
                out[name][...] = converted(results[name], out[name].dtype)
        if out and is_device(next(iter(out.values()))):
            return out
        if names == self._inputs.all:
            return results
        return {name: results[name] for name in self._inputs.names(names)}

    def _signature(self, names: int, step: int) -> int:
        """Return the signature of a call."""
        facts = names, self._schedule.mean
        # They rarely change, and a digest takes microseconds.
        if facts != self._digested:
            self._digest = digest(hex(names), facts[1], *self._compared.items())
            self._digested = facts
        # Steps that differ make signatures that differ, without another digest.
        return self._digest ^ step

    def _exchange(self, call: Call) -> bool:
        """Make one call; return whether all ranks have made the same one."""
        track, began = self._track, time.monotonic()
        track.thread = threading.get_ident()
        self._device.settle()
        agreed = self._device.finish(call)
        self.broken = False
        track.calls += 1
        if self._started:
            self._started = 0
            self._schedule.reset()
        self.waited += time.monotonic() - began
        return agreed

    def _wait(self, ready: Callable[[], bool | None], *, moves_data: bool) -> None:
        """Wait in the next call until ``ready`` returns something other than None."""
        deadline, control = Deadline(None, self._next()), self._group.control

        def look() -> bool | None:
            if (result := ready()) is None:
                control.check(self._track, deadline)
            return result

        try:
            deadline.wait(look, self._missing, moves_data=moves_data)
        except BaseException:
            control.depart(self._track)
            raise

    def _missing(self) -> str:
        if (late := self._schedule.late()) is None:
            late = self._group.control.absent(self._track)
        late = [rank for rank in late if rank not in self._group.lost]
        text = f"{format_ranks(late)} of {self._group.size} to make the same call"
        return "; ".join(filter(None, [text, self._track.advice]))

    def _explain(
        self, names: int, step: int, error: Exception | None, note: object = None
    ) -> NoReturn:
        """Raise on every rank what is wrong on one, or which fact differs."""
        contributed = self._inputs.names(names)
        facts = {
            self._step_name: str(step),
            "reduction_type": "MEAN" if self._schedule.mean else "SUM",
            **{name: repr(number) for name, number in self._compared.items()},
        }
        for name in self._schedule.arrays:
            facts[f"gradient of {name}"] = "one" if name in contributed else "none"
        reports = self._group.raise_present(self._name, error, (facts, note))
        notes = {rank: note for rank, (_, note) in reports.items()}
        if any(note is not None for note in notes.values()):
            raise Interruption(self._name, notes)
        of_all = {rank: facts for rank, (facts, _) in reports.items()}
        self._group.compare(self._name, of_all)
        if len(reports) < self._group.size:
            raise Interruption(self._name, notes)
        raise RuntimeError(
            f"{self._name}: ranks make different calls, but their arguments agree"
        )

    def compare(self, numbers: Mapping[str, float], step_name: str = "step") -> None:
        """Set numbers that must be the same on all ranks in each later call.

        Args:
            numbers: By name, for messages. They replace those of an earlier call.
            step_name: What messages call the ``step`` of `reduce`.
        """
        self._compared = {name: canonical(each) for name, each in numbers.items()}
        self._step_name = step_name
        self._digested = None

    def advise(self, advice: str) -> None:
        """Set what ends messages about ranks that do not make the next call."""
        self._track.advice = advice

    @property
    def calls(self) -> int:
        """Calls that this rank has completed; between two, the same on all ranks."""
        return self._track.calls

    @property
    def counted(self) -> Sequence[int]:
        """The ranks whose arrays the last call has reduced; the same on all ranks."""
        return self._schedule.counted

    @property
    def total_weight(self) -> float:
        """The sum of the weights of the arrays that the last call has reduced."""
        return self._schedule.total_weight

    def statistics(self) -> ReducerStatistics:
        """Return what the reducer uses and has done."""
        nodes, wire = len(self._group.nodes), self._options.wire_dtype
        return ReducerStatistics(
            schedule=self._schedule.name,
            ranks=self._group.size,
            nodes=nodes,
            buckets=len(self._schedule.buckets),
            wire_dtype=None if wire is None or nodes == 1 else str(wire),
            calls=self.calls,
            waited=self.waited,
            window_bytes=self._schedule.window_bytes,
            result_bytes=self._schedule.result_bytes,
        )

    def __repr__(self) -> str:
        """Show the schedule and the number of calls."""
        name, schedule = self._name, self._schedule.name
        return f"<Reducer {name!r}, {schedule}: {self.calls} calls>"

    def _describe(self) -> str:
        return self._name

    def place(self) -> str:
        """Return how many calls this rank has made, for messages."""
        return f"call {self.calls} of {self._name}"

    def needs(self, rank: int) -> bool:
        """Whether the job cannot go on; a process that lives may write to memory."""
        shrinks = self._options.on_loss == selection.SHRINK
        return not shrinks or rank not in self._group.dead

    def _free(self) -> None:
        broken = self._group.allgather(self.broken, f"{self.label}: free")
        self._inputs.free()
        self._device.free()
        self._group.control.close_track(self._track)
        self._schedule.free(abandoned=any(broken))
