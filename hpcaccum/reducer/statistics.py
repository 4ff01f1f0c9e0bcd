"""The statistics of a `Reducer`."""

from __future__ import annotations

from dataclasses import dataclass


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
