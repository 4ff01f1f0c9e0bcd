"""The numbers of a `Reducer`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ReducerStatistics:
    """The numbers of a reducer.

    Attributes:
        schedule: What is used; never ``"auto"``.
        ranks, nodes: Of the group.
        buckets: Pieces in which data travel.
        wire_dtype: In which sums travel between nodes; None if none do.
        calls: Reductions so far.
        waited: Seconds that this rank has spent in them.
        window_bytes: Of this rank's gradients.
        result_bytes: Of results, as far as they lie in this rank's memory: on a node
            that shares them, those of its first rank.
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
