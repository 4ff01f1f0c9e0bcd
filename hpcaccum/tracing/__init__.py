"""A timeline of all ranks, in Chrome's trace event format.

`trace` records the calls of methods that are marked in the code (`hpcaccum.spans`).
`clocks` compares the clocks of nodes, and `timeline` writes the file.

Imports `mpi` and what is below it.
"""

from __future__ import annotations

from hpcaccum.spans import span
from hpcaccum.tracing.tracer import trace

__all__ = ["span", "trace"]
