"""The list of schedules, and which of them a `Reducer` uses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpcaccum.arguments import one_of
from hpcaccum.dtypes import accumulation_dtype
from hpcaccum.errors import InvalidArgumentError
from hpcaccum.mpi import VARIABLE, cuda_awareness
from hpcaccum.reducer.buckets import cut
from hpcaccum.reducer.flat import Blocking, Flat, SmallFlat
from hpcaccum.reducer.hierarchical import Hierarchical
from hpcaccum.reducer.nccl import Nccl
from hpcaccum.reducer.one_shot import OneShot
from hpcaccum.reducer.schedule import Plan, Schedule
from hpcaccum.reducer.two_shot import TwoShot

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hpcaccum.layout import Layout
    from hpcaccum.mpi import Group
    from hpcaccum.reducer.schedule import Case
    from hpcaccum.reducer.spin_wait import SpinWait

AUTO = "auto"
# What happens when a rank is lost.
RAISE, SHRINK = "raise", "shrink"

# In the order in which they are tried.
SCHEDULES: list[type[Schedule]] = [
    OneShot,
    TwoShot,
    Hierarchical,
    SmallFlat,
    Flat,
    Blocking,
    Nccl,
]


def check_name(schedule: str) -> None:
    """Raise InvalidArgumentError unless this is the name of a schedule."""
    one_of("schedule", schedule, (AUTO, *_names(SCHEDULES)))


def check_wire(schedule: str) -> None:
    """Raise InvalidArgumentError unless a schedule of this name takes wire_dtype."""
    taking = _names(each for each in SCHEDULES if each.takes_wire_dtype)
    if schedule not in (AUTO, *taking):
        raise InvalidArgumentError(
            f"wire_dtype is for schedule {_listed([AUTO, *taking])}, not {schedule!r}"
        )


def check_direct(direct: bool, schedule: str) -> None:
    """Raise InvalidArgumentError if MPI is to be given memory that it cannot take."""
    if not direct:
        return
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


def check_loss(on_loss: str, schedule: str, group: Group) -> str:
    """Return the schedule to use if a rank may be lost.

    Raises:
        InvalidArgumentError: On this rank, if calls cannot go on without a rank.
    """
    one_of("on_loss", on_loss, (RAISE, SHRINK))
    if on_loss == RAISE:
        return schedule
    what, own = f"on_loss={SHRINK!r}", TwoShot.name
    if schedule not in (AUTO, own):
        taking = _listed([AUTO, own])
        raise InvalidArgumentError(f"{what} is for schedule {taking}, not {schedule!r}")
    if not group.single_node:
        raise InvalidArgumentError(
            f"{what} needs all ranks on one node, they are on {len(group.nodes)}"
        )
    if not group.sees_all:
        raise InvalidArgumentError(
            f"{what} needs ranks that see each other's processes (containers: "
            f"--pid=host)"
        )
    return own


def choose(schedule: str, case: Case) -> type[Schedule]:
    """Return the schedule to use."""
    named = [s for s in SCHEDULES if s.name == schedule]
    if schedule == AUTO:
        named = [s for s in SCHEDULES if s.preferred(case)]
    for each in named:
        if _possible(each, case):
            return each
    for each in named:
        if each.fallback is not None:
            return choose(each.fallback, case)
    if case.nodes > 1 and all(each.needs_one_node for each in named):
        raise InvalidArgumentError(
            f"schedule {schedule!r} needs all ranks on one node, they are on "
            f"{case.nodes}"
        )
    raise InvalidArgumentError(f"schedule {schedule!r} cannot be used for {case}")


def _possible(schedule: type[Schedule], case: Case) -> bool:
    """Whether a schedule can be used, by the properties that it states."""
    return (
        (case.nodes == 1 or not schedule.needs_one_node)
        and (case.wire_dtype is None or schedule.takes_wire_dtype)
        and case.cuda_aware == schedule.takes_device_memory
        and schedule.fits(case)
    )


def make(
    kind: type[Schedule],
    case: Case,
    group: Group,
    layout: Layout,
    wait: SpinWait,
    shrinks: bool = False,
) -> Schedule:
    """Return a schedule that was chosen. Collective."""
    nbytes = case.bucket_bytes or kind.bucket_bytes(case)
    # Whole cache lines, also of half precision.
    most = nbytes // accumulation_dtype(layout.dtype).itemsize // 32 * 32
    buckets = cut(layout.size, most)
    return kind(Plan(group, layout, buckets, case.wire_dtype, wait, shrinks))


def _names(schedules: Iterable[type[Schedule]]) -> list[str]:
    return list(dict.fromkeys(each.name for each in schedules))


def _listed(names: list[str]) -> str:
    *first, last = map(repr, names)
    return f"{', '.join(first)} or {last}" if first else last
