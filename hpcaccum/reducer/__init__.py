"""The Reducer: collective means and sums of named arrays, by one of several schedules.

`Reducer` checks the call and pairs it with those of the other ranks; `selection` picks
the schedule; each schedule moves and sums the data in its own way.

Imports `mpi`, `device` and the modules below them; never `accumulator`.
"""

from __future__ import annotations

from hpcaccum.reducer.device import check_direct
from hpcaccum.reducer.reducer import Reducer
from hpcaccum.reducer.statistics import ReducerStatistics

__all__ = [
    "Reducer",
    "ReducerStatistics",
    "check_direct",
]
