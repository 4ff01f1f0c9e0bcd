"""The arguments of a `Reducer`, checked, and its statistics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcaccum.arguments import REDUCTIONS, bucket_size, one_of, wire_format
from hpcaccum.layout import Layout
from hpcaccum.reducer import selection

if TYPE_CHECKING:
    from typing_extensions import Self

    from hpcaccum.mpi import Group

# So many arrays are compared one by one, for messages that name one; all of them by a
# hash, as each rank gets the facts of every other.
_NAMED = 16


def check_schedule(
    schedule: str, wire_dtype: Any, cuda_aware: bool, on_loss: str, group: Group
) -> str:
    """Return the schedule to use; raise unless these arguments fit together."""
    selection.check_name(schedule)
    if wire_dtype is not None:
        selection.check_wire(schedule)
    selection.check_direct(cuda_aware, schedule)
    return selection.check_loss(on_loss, schedule, group)


@dataclass(frozen=True)
class Options:
    """The arguments of a reducer."""

    reduction_type: str
    schedule: str
    wire_dtype: np.dtype[Any] | None
    bucket_bytes: int | None
    cuda_aware: bool
    on_loss: str

    @classmethod
    def checked(
        cls,
        layout: Any,
        reduction_type: str,
        schedule: str,
        wire_dtype: Any,
        bucket_bytes: int | None,
        cuda_aware: bool,
        on_loss: str,
        group: Group,
    ) -> Self:
        """Return the arguments."""
        if not isinstance(layout, Layout):
            raise TypeError(f"layout must be a Layout, got {type(layout).__name__}")
        one_of("reduction_type", reduction_type, REDUCTIONS)
        wire = wire_format(wire_dtype, layout.dtype)
        used = check_schedule(schedule, wire, cuda_aware, on_loss, group)
        nbytes = bucket_size(bucket_bytes)
        return cls(reduction_type, used, wire, nbytes, bool(cuda_aware), on_loss)

    def facts(self, layout: Layout) -> dict[str, object]:
        """Return what must be the same on all ranks, as messages name it."""
        first = list(layout.shapes.items())[:_NAMED]
        arrays = [(name, str(layout.dtype), shape) for name, shape in first]
        return {
            **{f"array {number}": each for number, each in enumerate(arrays)},
            "names, shapes and dtype": layout.fingerprint,
            **vars(self),
            "wire_dtype": str(self.wire_dtype),
        }


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
