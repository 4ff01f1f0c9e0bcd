"""Which schedule a `Reducer` takes, and how it is made."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hpcaccum.dtypes import accumulation_dtype
from hpcaccum.errors import InvalidArgumentError
from hpcaccum.reducer.blocking import Blocking
from hpcaccum.reducer.hierarchical import Hierarchical
from hpcaccum.reducer.one_shot import OneShot
from hpcaccum.reducer.schedules import Flat, Plan, Shared, cut

if TYPE_CHECKING:
    import numpy as np

    from hpcaccum.layout import Layout
    from hpcaccum.mpi import Group
    from hpcaccum.reducer.schedules import Schedule

SCHEDULES = ("auto", "shared", "hierarchical", "flat")

# Pieces that travel between nodes, and those that stay in the cache of one.
_BUCKET, _SHARED_BUCKET = 8 << 20, 2 << 20
# Bytes below which the library's allreduce over several nodes is faster, measured with
# two nodes of two ranks.
_FLAT = 512 << 10
# Bytes up to which on one node each rank sums everything itself.
_EAGER = 32 << 10


def choose(schedule: str, group: Group, nodes: int, nbytes: int, *, wired: bool) -> str:
    """Return the schedule to use.

    Args:
        schedule: That was asked for.
        group: The ranks.
        nodes: On how many nodes they are.
        nbytes: Of the arrays.
        wired: Whether sums travel in a dtype of their own.

    Raises:
        InvalidArgumentError: On every rank, for ``"shared"`` on several nodes.
    """
    if schedule == "shared" and nodes > 1:
        raise InvalidArgumentError(
            f"schedule 'shared' needs all ranks on one node, they are on {nodes}"
        )
    if schedule == "flat":
        return schedule
    # With one node there is nothing to do between nodes.
    if nodes == 1:
        return "shared"
    flat = nodes == group.size or nbytes < _FLAT
    return "flat" if schedule == "auto" and flat and not wired else "hierarchical"


def make(
    schedule: str,
    group: Group,
    layout: Layout,
    bucket_bytes: int | None,
    wire: np.dtype[Any] | None,
    *,
    cuda_aware: bool,
) -> tuple[Schedule, list[slice]]:
    """Return the schedule itself, and the buckets in which it works. Collective."""
    shared, wide = schedule == "shared", accumulation_dtype(layout.dtype)
    nbytes = bucket_bytes or (_SHARED_BUCKET if shared else _BUCKET)
    # Whole cache lines, also of half precision.
    buckets = cut(layout.size, nbytes // wide.itemsize // 32 * 32)
    plan = Plan(group, layout, buckets, wire)
    if shared and layout.nbytes <= _EAGER and bucket_bytes is None:
        return OneShot(group, layout), buckets
    if shared:
        return Shared(plan), buckets
    flat = Blocking if cuda_aware else Flat
    return (flat if schedule == "flat" else Hierarchical)(plan), buckets
