"""Gradients that have some rows of a matrix only, such as an embedding's.

`indexed_slices` has what users pass; `sums` adds rows, each of which then has one
index; `format` states how rows lie in memory that ranks share; `exchange` sums rows
over the ranks of a group; a `log` on each node has the rows that updates have changed.

Imports `mpi`, `device` and the modules below them.
"""

from __future__ import annotations

from hpcaccum.rows.exchange import RowExchange, RowFormat
from hpcaccum.rows.format import (
    RowPlace,
    indices_in,
    nbytes_of,
    number_in,
    overflow,
    remove_rows,
    rows_in,
    write_rows,
)
from hpcaccum.rows.indexed_slices import UNKNOWN, IndexedSlices, check_indices, matrix
from hpcaccum.rows.log import RowLog
from hpcaccum.rows.sums import Rows, distinct, merged, union_size

__all__ = [
    "UNKNOWN",
    "IndexedSlices",
    "RowExchange",
    "RowFormat",
    "RowLog",
    "RowPlace",
    "Rows",
    "check_indices",
    "distinct",
    "indices_in",
    "matrix",
    "merged",
    "nbytes_of",
    "number_in",
    "overflow",
    "remove_rows",
    "rows_in",
    "union_size",
    "write_rows",
]
