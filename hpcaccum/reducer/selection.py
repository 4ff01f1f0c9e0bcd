"""The arguments of a `Reducer`, and which schedule it uses with them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from hpcaccum.arguments import REDUCTIONS, bucket_size, one_of, wire_format
from hpcaccum.dtypes import accumulation_dtype
from hpcaccum.errors import InvalidArgumentError
from hpcaccum.layout import Layout
from hpcaccum.mpi import VARIABLE, Group, cuda_awareness
from hpcaccum.reducer.flat import Blocking, Flat, SmallFlat
from hpcaccum.reducer.hierarchical import Hierarchical
from hpcaccum.reducer.nccl import Nccl
from hpcaccum.reducer.one_shot import OneShot
from hpcaccum.reducer.schedule import Case, Plan, Schedule, SpinWait, cut
from hpcaccum.reducer.two_shot import TwoShot

AUTO = "auto"
# What happens when a rank is lost.
RAISE, SHRINK = "raise", "shrink"
# So many arrays are compared one by one, for messages that name one; all of them by a
# hash, as each rank gets the facts of every other.
_NAMED = 16

# Bytes up to which each rank of a node sums everything; up to which a rank sends all
# data in each message; from which nodes of several ranks first sum inside (measured on
# two nodes of two ranks).
_ONE_SHOT, _SMALL_FLAT, _HIERARCHICAL = 32 << 10, 64 << 10, 512 << 10

SCHEDULES: list[type[Schedule]] = [
    OneShot,
    TwoShot,
    Hierarchical,
    SmallFlat,
    Flat,
    Blocking,
    Nccl,
]


def check_schedule(
    schedule: str, wire_dtype: Any, cuda_aware: bool, on_loss: str, group: Group
) -> str:
    """Return the schedule to use; raise unless these arguments fit together."""
    one_of("schedule", schedule, (AUTO, *_names(SCHEDULES)))
    one_of("on_loss", on_loss, (RAISE, SHRINK))
    taking = [AUTO, *_names(each for each in SCHEDULES if each.takes_wire_dtype)]
    if wire_dtype is not None and schedule not in taking:
        raise InvalidArgumentError(
            f"wire_dtype is for schedule {_listed(taking)}, not {schedule!r}"
        )
    if cuda_aware:
        _check_direct(schedule)
    if on_loss == SHRINK:
        _check_loss(schedule, group)
        return TwoShot.name
    return schedule


def _check_direct(schedule: str) -> None:
    """Raise InvalidArgumentError if MPI is to be given memory that it cannot take."""
    taking = _names(each for each in SCHEDULES if each.takes_device_memory)
    if schedule not in taking:
        raise InvalidArgumentError(
            f"cuda_aware=True is for schedule {_listed(taking)}, got {schedule!r}: the "
            f"others do not pass device memory to MPI"
        )
    answer = cuda_awareness()
    if not answer.aware:
        raise InvalidArgumentError(
            f"cuda_aware=True, but this MPI does not accept device memory: "
            f"{answer.reason}; if it does, set {VARIABLE}=1"
        )


def _check_loss(schedule: str, group: Group) -> None:
    """Raise InvalidArgumentError if calls cannot go on without a rank."""
    what, taking = f"on_loss={SHRINK!r}", [AUTO, TwoShot.name]
    if schedule not in taking:
        raise InvalidArgumentError(
            f"{what} is for schedule {_listed(taking)}, not {schedule!r}"
        )
    if not group.single_node:
        raise InvalidArgumentError(
            f"{what} needs all ranks on one node, they are on {len(group.nodes)}"
        )
    if not group.sees_all:
        raise InvalidArgumentError(
            f"{what} needs ranks that see each other's processes (containers: "
            f"--pid=host)"
        )


class Options(NamedTuple):
    """The arguments of a reducer."""

    reduction_type: str
    schedule: str
    wire_dtype: Any
    bucket_bytes: int | None
    cuda_aware: bool
    on_loss: str

    def checked(self, layout: Any, group: Group) -> Options:
        """Return them as they are used, or raise an error."""
        if not isinstance(layout, Layout):
            raise TypeError(f"layout must be a Layout, got {type(layout).__name__}")
        one_of("reduction_type", self.reduction_type, REDUCTIONS)
        wire = wire_format(self.wire_dtype, layout.dtype)
        return self._replace(
            schedule=check_schedule(
                self.schedule, wire, self.cuda_aware, self.on_loss, group
            ),
            wire_dtype=wire,
            bucket_bytes=bucket_size(self.bucket_bytes),
            cuda_aware=bool(self.cuda_aware),
        )

    def facts(self, layout: Layout) -> dict[str, object]:
        """Return what must be the same on all ranks, as messages name it."""
        first = list(layout.shapes.items())[:_NAMED]
        arrays = [(name, str(layout.dtype), shape) for name, shape in first]
        return {
            **{f"array {number}": each for number, each in enumerate(arrays)},
            "names, shapes and dtype": layout.fingerprint,
            **self._asdict(),
            "wire_dtype": str(self.wire_dtype),
        }


def make(options: Options, group: Group, layout: Layout, wait: SpinWait) -> Schedule:
    """Return the schedule for these options. Collective."""
    case = Case(
        ranks=group.size,
        nodes=len(group.nodes),
        cores=group.least_cores,
        nbytes=layout.nbytes,
        wire_dtype=options.wire_dtype,
        bucket_bytes=options.bucket_bytes,
        cuda_aware=options.cuda_aware,
    )
    kind = choose(options.schedule, case)
    nbytes = case.bucket_bytes or kind.bucket_bytes(case)
    # Whole cache lines, also of half precision.
    most = nbytes // accumulation_dtype(layout.dtype).itemsize // 32 * 32
    buckets, shrinks = cut(layout.size, most), options.on_loss == SHRINK
    return kind(Plan(group, layout, buckets, case.wire_dtype, wait, shrinks))


def choose(schedule: str, case: Case) -> type[Schedule]:
    """Return the schedule to use."""
    if case.nodes > 1 and schedule in (TwoShot.name, Nccl.name):
        raise InvalidArgumentError(
            f"schedule {schedule!r} needs all ranks on one node, they are on "
            f"{case.nodes}"
        )
    if schedule == Nccl.name:
        return Nccl
    if case.cuda_aware:
        return Blocking
    if case.nodes == 1 and schedule != Flat.name:
        # It has no buckets.
        small = case.nbytes <= _ONE_SHOT and case.bucket_bytes is None
        return OneShot if small else TwoShot
    large = case.nodes < case.ranks and case.nbytes >= _HIERARCHICAL
    # No other one between nodes takes a wire_dtype.
    best = schedule == AUTO and (large or case.wire_dtype is not None)
    if best or schedule == Hierarchical.name:
        return Hierarchical
    small = case.nbytes <= min(_SMALL_FLAT, case.bucket_bytes or _SMALL_FLAT)
    return SmallFlat if small else Flat


def _names(schedules: Iterable[type[Schedule]]) -> list[str]:
    return list(dict.fromkeys(each.name for each in schedules))


def _listed(names: list[str]) -> str:
    *first, last = map(repr, names)
    return f"{', '.join(first)} or {last}" if first else last
