"""The public call `trace`."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

from hpcaccum.errors import InvalidArgumentError
from hpcaccum.files import check_writable
from hpcaccum.mpi import Group, group_of
from hpcaccum.spans import Recorder, clock, recorded_by, recording
from hpcaccum.tracing.clocks import measure
from hpcaccum.tracing.timeline import Timeline

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator

    from mpi4py import MPI as mpi4py_MPI


@contextlib.contextmanager
def trace(
    path: str | os.PathLike[str], comm: mpi4py_MPI.Comm | Group | None = None
) -> Iterator[None]:
    """Record what every rank does during the block; rank 0 writes it to a file.

    The beginning and the end are collective. Objects may be created before or in the
    block. Open the file in https://ui.perfetto.dev or in ``chrome://tracing``: it has a
    row for each rank, and one for each thread that serves other ranks. Mark blocks of
    your program with `span`.

    If the block raises an exception, nothing is written: the other ranks may not have
    reached its end. The events of a rank that is lost are lost with it.

    Args:
        path: Of the JSON file, on rank 0; an existing file is overwritten.
        comm: Communicator of the ranks; COMM_WORLD by default.

    Raises:
        TypeError, InvalidArgumentError: On every rank, before the block, if the file
            cannot be written or a trace is running.
        OSError: After the block, on rank 0, if the file cannot be written; the other
            ranks continue.
    """
    group = group_of(comm)
    file = group.agree("trace", lambda: _checked(path, group.rank), lambda _: {})
    before, recorder = measure(group), Recorder()
    origin = group.allgather(clock(), "trace: begin")[0]
    with recorded_by(recorder):
        yield
    after = measure(group)
    Timeline(group, recorder, before, after, origin).write(file)


def _checked(path: str | os.PathLike[str], rank: int) -> Path:
    if recording() is not None:
        raise InvalidArgumentError("a trace is running already")
    file = Path(path)
    if rank == 0:
        # As begin the messages of `Group.agree`, which leaves it out then.
        check_writable("trace:", file)
    return file
