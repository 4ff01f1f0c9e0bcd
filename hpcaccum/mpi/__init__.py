"""MPI, loaded at its first use (`runtime`), and what the other packages build on.

Collectives: A `Group` is a private communicator with exchanges that name the ranks they
    wait for (`control`, over a `Mailbox`). `complete` waits for requests.
Memory: `AtomicWords` (parts of a `word_window`) and `NodeMemory` are mapped by all
    ranks of a node. Ranks of all nodes reach a `Region` one-sidedly. Both `windows` are
    MPI's; `progress` says how often a thread calls MPI for other nodes.
Lifetime: `Freeable` is the base class of collective objects; `shutdown` frees them at
    the end of the program, or ends the job. The `heartbeat` finds ranks that are lost;
    `failures` makes calls of MPI that go on then.
Environment: `launcher` and `cuda_aware` find out how the job was started, and what MPI
    accepts.

All calls of MPI windows are in this package. Imports `errors`, `deadline` and
`wake` only.
"""

from __future__ import annotations

from hpcaccum.mpi.atomic_words import AtomicWords
from hpcaccum.mpi.control_messages import Tag
from hpcaccum.mpi.creation import duplicate, split
from hpcaccum.mpi.cuda_aware import VARIABLE, cuda_awareness
from hpcaccum.mpi.failures import begun, is_complete, receive
from hpcaccum.mpi.group import Group
from hpcaccum.mpi.launcher import (
    is_rank,
    launched_ranks,
    number_in,
    slurm_plugin,
)
from hpcaccum.mpi.lifetime import Freeable
from hpcaccum.mpi.mailbox import Mailbox
from hpcaccum.mpi.node_memory import NodeMemory, memory_of_rank
from hpcaccum.mpi.progress import short_switch_interval
from hpcaccum.mpi.region import Region
from hpcaccum.mpi.requests import complete, keep
from hpcaccum.mpi.runtime import MPI, lack_of_threads
from hpcaccum.mpi.shutdown import (
    abort_job,
    install_excepthook,
    is_ending,
    report_and_abort,
)
from hpcaccum.mpi.windows import memory_barrier

__all__ = [
    "MPI",
    "VARIABLE",
    "AtomicWords",
    "Freeable",
    "Group",
    "Mailbox",
    "NodeMemory",
    "Region",
    "Tag",
    "abort_job",
    "begun",
    "complete",
    "cuda_awareness",
    "duplicate",
    "install_excepthook",
    "is_complete",
    "is_ending",
    "is_rank",
    "keep",
    "lack_of_threads",
    "launched_ranks",
    "memory_barrier",
    "memory_of_rank",
    "number_in",
    "receive",
    "report_and_abort",
    "short_switch_interval",
    "slurm_plugin",
    "split",
]
