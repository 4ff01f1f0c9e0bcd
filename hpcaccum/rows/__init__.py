"""Gradients that have some rows of a matrix only, such as an embedding's.

`indexed_slices` has what users pass; `sums` adds rows, each of which then has one
index; `format` states how rows lie in memory that ranks share; `exchange` sums rows
over the ranks of a group; a `log` on each node has the rows that updates have changed.

Imports `mpi`, `device` and the modules below them.
"""

from __future__ import annotations

from hpcaccum.rows.exchange import RowExchange, columns
from hpcaccum.rows.format import RowFormat, RowPlace, divided
from hpcaccum.rows.indexed_slices import (
    UNKNOWN,
    IndexedSlices,
    check_indices,
    matrix,
    rows_of,
    sliced,
)
from hpcaccum.rows.log import RowLog
from hpcaccum.rows.sums import Rows, merged, weighted

__all__ = [
    "UNKNOWN",
    "IndexedSlices",
    "RowExchange",
    "RowFormat",
    "RowLog",
    "RowPlace",
    "Rows",
    "check_indices",
    "columns",
    "divided",
    "matrix",
    "merged",
    "rows_of",
    "sliced",
    "weighted",
]
