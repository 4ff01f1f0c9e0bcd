"""MPI, loaded at its first use (`runtime`), and what the other packages build on.

job: How this process is part of a job. `runtime` and `launcher` start MPI; `shutdown`
    frees what is open at the end of the program, or ends the job; `process` has what
    ranks know of each other's processes.
talk: A `Group` is a private communicator with exchanges that name the ranks they wait
    for (`control`, over a `Mailbox`). `requests` waits for requests of MPI, and goes on
    after a rank is lost. `progress` says how often a thread calls MPI for other nodes;
    `creation` makes communicators.
memory: `AtomicWords` and `NodeMemory` are mapped by all ranks of a node. Ranks of all
    nodes reach a `Region` one-sidedly. `windows` makes those of MPI.
life: `group_of` returns the group of a communicator. `Freeable` is the base class of
    collective objects; while there are any, the `heartbeat` finds ranks that are lost.

`talk` imports `job`; `memory` and `life` import both, and not each other. All calls of
MPI windows are in this package. Imports `deadline` and the modules below it.
"""

from __future__ import annotations

from hpcaccum.mpi.job.launcher import is_rank, launched_ranks, number_in, slurm_plugin
from hpcaccum.mpi.job.runtime import MPI, VARIABLE, cuda_awareness, lack_of_threads
from hpcaccum.mpi.job.shutdown import abort_job, install_excepthook, is_ending, or_abort
from hpcaccum.mpi.life.lifetime import Freeable, Objects, group_of
from hpcaccum.mpi.memory.atomic_words import AtomicWords, bits, number_of
from hpcaccum.mpi.memory.node_memory import NodeMemory, memory_of_rank
from hpcaccum.mpi.memory.region import Region
from hpcaccum.mpi.memory.windows import memory_barrier
from hpcaccum.mpi.talk.creation import duplicate, split
from hpcaccum.mpi.talk.group import Group
from hpcaccum.mpi.talk.mailbox import Tag
from hpcaccum.mpi.talk.progress import short_switch_interval
from hpcaccum.mpi.talk.requests import begun, complete, is_complete, keep, receive

__all__ = [
    "MPI",
    "VARIABLE",
    "AtomicWords",
    "Freeable",
    "Group",
    "NodeMemory",
    "Objects",
    "Region",
    "Tag",
    "abort_job",
    "begun",
    "bits",
    "complete",
    "cuda_awareness",
    "duplicate",
    "group_of",
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
    "number_of",
    "or_abort",
    "receive",
    "short_switch_interval",
    "slurm_plugin",
    "split",
]
