"""A timeline of all ranks, in Chrome's trace event format.

`trace` replaces the methods of `table` by wrappers that record when each call began and
ended, and puts the methods back at its end: without a trace no call is slower.
`recorder` keeps the events of a rank, `clocks` compares the clocks of nodes, and
`timeline` writes the file.

Imports internal modules of all packages below, to name their methods.
"""

from __future__ import annotations

from hpcaccum.tracing.recorder import span
from hpcaccum.tracing.tracer import trace

__all__ = ["span", "trace"]
