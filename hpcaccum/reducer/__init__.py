"""The Reducer: collective means and sums of named arrays, by one of several schedules.

`Reducer` checks each call and pairs it with those of the other ranks; `selection` lists
the schedules and picks one; `schedule` is their contract. On one node these are
`one_shot` and `two_shot`, between nodes `hierarchical`, anywhere `flat`, on devices
`nccl`.

Imports `mpi`, `device` and single modules; never `accumulator`.
"""

from __future__ import annotations

from hpcaccum.reducer.reducer import Reducer, ReducerStatistics
from hpcaccum.reducer.selection import RAISE, check_schedule
from hpcaccum.reducer.signature import Interruption

__all__ = [
    "RAISE",
    "Interruption",
    "Reducer",
    "ReducerStatistics",
    "check_schedule",
]
