"""Counts what calls cost, in operations and messages, on any number of ranks and nodes.

``costs`` returns what docs/growth.md has formulas for. Nothing is timed: each call is
counted when it need not wait, so that the counts are the same in every run.

    mpiexec -n 64 python -m tests.mpi.growth 64/16 64/4

prints the costs on 64 made-up ranks on 16 nodes and on 4 nodes, as JSON.
"""

from __future__ import annotations

import contextlib
import functools
import json
import pickle
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
from mpi4py import MPI

from hpcaccum import ConditionalAccumulator, Group
from hpcaccum.deadline import Deadline
from hpcaccum.mpi import atomic_words, region, windows, word_window
from hpcaccum.nodes import Agent
from hpcaccum.server import BoundedStalenessInbox, Parameters

from ..common import WAIT

# Elements of a gradient; so many that no rank sends it at once, and one piece.
SIZE = 1 << 13
NBYTES = SIZE * 4

Costs = dict[str, dict[str, int]]


class CountedWindow:
    """A window whose one-sided operations are counted.

    Operations that are complete together, at a flush, take one round trip.
    """

    def __init__(self, window: Any, counts: Counter[str]) -> None:
        self._window, self._counts = window, counts
        self._pending = False

    def __getattr__(self, name: str) -> Any:
        """Return what is not counted."""
        return getattr(self._window, name)

    def _count(self, nbytes: int) -> None:
        self._counts.update(operations=1, bytes=nbytes)
        self._pending = True

    def Fetch_and_op(self, origin: Any, *rest: Any) -> None:
        self._count(origin.nbytes)
        self._window.Fetch_and_op(origin, *rest)

    def Compare_and_swap(self, origin: Any, *rest: Any) -> None:
        self._count(origin.nbytes)
        self._window.Compare_and_swap(origin, *rest)

    def Get_accumulate(self, origin: Any, result: Any, *rest: Any) -> None:
        self._count(result.nbytes)
        self._window.Get_accumulate(origin, result, *rest)

    def Accumulate(self, origin: Any, *rest: Any) -> None:
        # With its datatype, it is a list.
        self._count((origin[0] if isinstance(origin, list) else origin).nbytes)
        self._window.Accumulate(origin, *rest)

    def Flush(self, root: int) -> None:
        self._counts.update(round_trips=int(self._pending))
        self._pending = False
        self._window.Flush(root)


class CountedComm:
    """The communicator of agents, whose messages to other nodes are counted."""

    def __init__(self, agent: Agent, counts: Counter[str]) -> None:
        self._comm, self._counts = agent.comm, counts
        self._home = agent.leaders[agent.node]

    def __getattr__(self, name: str) -> Any:
        """Return what is not counted."""
        return getattr(self._comm, name)

    def issend(self, message: Any, rank: int, tag: int) -> Any:
        self._count(message, rank)
        return self._comm.issend(message, rank, tag)

    def isend(self, message: Any, rank: int, tag: int) -> Any:
        self._count(message, rank)
        return self._comm.isend(message, rank, tag)

    def _count(self, message: Any, rank: int) -> None:
        if rank != self._home:
            size = len(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))
            self._counts.update(requests=1, request_bytes=size)

    def Isend(self, data: Any, rank: int, tag: int) -> Any:
        self._counts.update(vectors=int(data.nbytes == NBYTES))
        return self._comm.Isend(data, rank, tag)


@contextlib.contextmanager
def counted_windows(counts: Counter[str]) -> Iterator[None]:
    """Count the operations in all windows that are made in the block.

    With any library, several operations may take one round trip, and ranks of the
    root's node need no agent.
    """
    allocate = windows.allocate

    def counted(*args: Any) -> CountedWindow:
        return CountedWindow(allocate(*args), counts)

    with (
        mock.patch.object(word_window, "allocate", counted),
        mock.patch.object(region, "allocate", counted),
        mock.patch.object(atomic_words, "is_open_mpi", return_value=False),
    ):
        yield


def count_messages(group: Group, counts: Counter[str]) -> None:
    """Count the messages that this rank and its agent send to other nodes."""
    agent: Any = Agent.of(group)
    agent.comm = CountedComm(agent, counts)


class Meter:
    """Counts calls of one rank, or of all, and what they make agents send."""

    def __init__(self, group: Group) -> None:
        self._group, self._counts = group, Counter[str]()
        self.rank, self.size = group.rank, group.size
        # A rank on another node than rank 0, which has the words.
        self.far = group.nodes[-1][-1]
        self.costs: Costs = {}

    def windows(self) -> contextlib.AbstractContextManager[None]:
        """Count the operations in all windows that are made in the block."""
        return counted_windows(self._counts)

    def agents(self) -> None:
        """Count the messages of agents from now on."""
        if not self._group.single_node:
            count_messages(self._group, self._counts)

    def meet(self) -> None:
        """Wait for all ranks. Collective."""
        # In MPI: 64 ranks that poll in Python need seconds on 2 cores.
        self._group.comm.Barrier()

    def act(self, rank: int, what: str, do: Callable[[], Any]) -> None:
        """Count a call of one rank; name its cost ``what``. Collective."""
        self._begin()
        if self._group.rank == rank:
            do()
        self._note(what, rank)

    def everybody(self, what: str, do: Callable[[], Any]) -> None:
        """Count a call of all ranks; the operations are those of `far`."""
        self._begin()
        do()
        self._note(what, self.far)

    def _begin(self) -> None:
        self.meet()
        self._counts.clear()
        self.meet()

    def _note(self, what: str, rank: int) -> None:
        """Store operations of one rank, and messages of all."""
        self.meet()
        found = self._group.comm.allgather(dict(self._counts))
        messages = Counter[str]()
        for counts in found:
            messages.update(counts)
        cost = {name: found[rank].get(name, 0) for name in _OPERATIONS}
        cost |= {name: messages[name] for name in _MESSAGES}
        self.costs[what] = cost


_OPERATIONS = "operations", "bytes", "round_trips"
_MESSAGES = "requests", "request_bytes", "vectors"


def costs(group: Group) -> Costs:
    """Return the cost of each call, on several nodes. Collective."""
    meter = Meter(group)
    with meter.windows():
        accumulator = ConditionalAccumulator("float32", (SIZE,), comm=group)
        inbox = BoundedStalenessInbox(group, 0, SIZE, "float32", max_lag=0)
        parameters = Parameters(group, 0, SIZE, np.float32, "growth")
    meter.agents()
    _count_rounds(meter, group, accumulator)
    _count_updates(meter, inbox)
    _count_pulls(meter, parameters)
    meter.meet()
    parameters.free()
    inbox.free()
    accumulator.free()
    return meter.costs


def _count_rounds(meter: Meter, group: Group, acc: ConditionalAccumulator) -> None:
    gradient, far = np.ones(SIZE, np.float32), meter.far

    def apply(step: int) -> Callable[[], Any]:
        return lambda: acc.apply_grad(gradient, step)

    for step, (taker, name) in enumerate([(0, ""), (far, ", copied"), (far, "")]):
        slot = acc.slot(timeout=WAIT)
        slot[:] = 1
        if group.rank != far:
            acc.apply_grad(slot, step)
        array = gradient if name else slot
        meter.act(
            far, f"apply_grad{name}", functools.partial(acc.apply_grad, array, step)
        )
        meter.act(taker, "take_grad", lambda: acc.take_grad(group.size, timeout=WAIT))
        meter.act(far, "apply_grad, stale", apply(step))


def _count_updates(meter: Meter, inbox: BoundedStalenessInbox) -> None:
    def submit(step: int) -> None:
        inbox.slot(step)[:] = 1
        assert inbox.submit(step)

    def apply(step: int) -> None:
        total, deadline = np.zeros(SIZE, np.float32), Deadline(WAIT, "growth")
        inbox.next(
            step, deadline, lambda batch: batch.total(total, deadline, threads=1)
        )
        assert (total == 1).all()

    for step in range(3):
        meter.act(meter.far, "submit", functools.partial(submit, step))
        meter.act(0, "update", functools.partial(apply, step))


def _count_pulls(meter: Meter, parameters: Parameters) -> None:
    def publish(step: int) -> None:
        parameters.publish(lambda flat: flat.fill(step), step)

    def pull(step: int) -> None:
        parameters.wait(step, Deadline(WAIT, "growth"), str)

    for step in range(2):
        meter.act(0, "publish", functools.partial(publish, step))
        meter.act(meter.far, "step", parameters.newest)
        meter.everybody("pull", functools.partial(pull, step))
        meter.everybody("pull, again", parameters.version)

    def publish_and_pull(step: int) -> None:
        if meter.rank == 0:
            parameters.publish(lambda flat: flat.fill(step), step, range(meter.size))
        parameters.wait(step, Deadline(WAIT, "growth"), str, comes=True)

    for step in range(2, 4):
        meter.everybody("pull, unasked", functools.partial(publish_and_pull, step))


def main(layouts: list[str]) -> None:
    """Print the costs for each layout "RANKS/NODES"; extra ranks wait."""
    world = MPI.COMM_WORLD
    for layout in layouts:
        ranks, nodes = map(int, layout.split("/"))
        color = int(world.rank >= ranks)
        comm = world.Split(color, world.rank)
        if not color:
            node = comm.Split(comm.rank * nodes // ranks, comm.rank)
            group = Group(comm.Dup(), node)
            found = costs(group)
            if world.rank == 0:
                print(json.dumps([ranks, nodes, found]), flush=True)
            group.free()
        _rest(world)
        comm.Free()


def _rest(world: MPI.Intracomm) -> None:
    """Wait for all ranks, without keeping a core busy."""
    request = world.Ibarrier()
    while not request.Test():
        time.sleep(0.01)


if __name__ == "__main__":
    main(sys.argv[1:])
