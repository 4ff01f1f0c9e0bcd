"""Reduction over several nodes: inside each of them, then between them."""

from __future__ import annotations

import itertools
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hpcaccum.dtypes import accumulation_dtype
from hpcaccum.mpi import MPI
from hpcaccum.reducer.call import copy, copy_in
from hpcaccum.reducer.node_sum import NodeSum
from hpcaccum.reducer.schedules import Agreement
from hpcaccum.reducer.spin_wait import SpinWait
from hpcaccum.summation import add_in_order

if TYPE_CHECKING:
    from mpi4py import MPI as mpi4py_MPI

    from hpcaccum.mpi import Group
    from hpcaccum.reducer.call import Call
    from hpcaccum.reducer.schedules import Plan

Array = np.ndarray[Any, Any]


class Hierarchical:
    """Stripes are summed inside each node, then between the nodes.

    The order of summation is fixed: ranks in their order inside a node, then nodes in
    the order of their first ranks.
    """

    def __init__(self, plan: Plan) -> None:
        group, layout = plan.group, plan.layout
        nodes = node_ranks(group)
        # With nodes of different size, some ranks of the larger ones only bring.
        stripes = min(map(len, nodes))
        self._inside = group.split(nodes)
        self._comm = group.comm.Dup()
        place = self._inside.rank
        number = next(n for n, ranks in enumerate(nodes) if group.rank in ranks)
        color = place if place < stripes else MPI.UNDEFINED
        peers: Any = group.comm.Split(color, number)
        self._peers, self._spin = Peers(peers, plan), SpinWait(group)
        self._sum = NodeSum(self._inside, layout, plan.buckets, stripes, self._progress)
        self.arrays, self.results = self._sum.arrays, self._sum.results
        self.sent, self.received = self._sum.sent, self._sum.received
        self.window_bytes = self._sum.window_bytes
        self.result_bytes = self._sum.result_bytes

    def _progress(self) -> None:
        self._peers.progress()
        self._comm.Iprobe()

    @property
    def divisor(self) -> int:
        """Of the sums over all nodes."""
        return self._peers.divisor

    @divisor.setter
    def divisor(self, divisor: int) -> None:
        self._peers.divisor = divisor

    def offer(self, count: int) -> None:
        """Sum inside the node what is ready there, and send it on its way."""
        self._sum.offer(count)
        self._send()

    def _send(self) -> None:
        for number in range(self._peers.begun, self._sum.summed):
            self._peers.begin(self._sum.stripes[number])
        self._peers.progress()

    def finish(self, call: Call) -> bool:
        """Sum the other buckets and compare the signatures."""
        count = len(self._sum.buckets)
        copy_in(call.brought, self.arrays, self.sent)
        if call.ready is not None:
            for number in range(count):
                call.ready(number)
                self.offer(number + 1)
        self._sum.bring(count)
        while self._sum.summed < count:
            self._sum.sum_next(call.wait)
            self._send()
        agreement = Agreement(self._comm, call.signature)
        self._spin(
            lambda: self._peers.progress() and agreement.request.Test(), call.wait
        )
        # Inside a node all signatures are one, as other nodes would not hear of it.
        self._sum.report(0)
        self._sum.end(0, call.wait)
        self._peers.begun = 0
        # Not earlier: a bucket is complete when all ranks of the node say so.
        call.tell(count)
        copy(self.results, call.out)
        return agreement.reached

    def late(self) -> list[int] | None:
        """Return None: a rank of another node may be the one."""
        return None

    def free(self, *, abandoned: bool = False) -> None:
        """Free windows and communicators. Collective."""
        self._sum.free()
        self.sent = self.received = self._sum.sent
        self.arrays, self.results = {}, {}
        if not abandoned:
            self._peers.free()
            self._comm.Free()
        self._inside.free()


class _Transfer(NamedTuple):
    request: Any
    vector: Array
    buffers: tuple[Array, Array]


class Peers:
    """Sums of vectors over ranks of different nodes, in the order of the ranks.

    Each rank gets a piece of everybody's vector, sums these, and gives the sum to all.
    That moves no more bytes than the best allreduce, and the order is ours.

    Args:
        comm: The ranks, COMM_NULL on one that takes no part; freed by `free`.
        plan: Of the reducer.

    Attributes:
        begun: Vectors begun in this call.
        divisor: Of the sums.
    """

    def __init__(self, comm: mpi4py_MPI.Intracomm, plan: Plan) -> None:
        self._comm, self.divisor = comm, 1
        self._threads = plan.group.own_cores
        self._dtype = (
            accumulation_dtype(plan.layout.dtype) if plan.wire is None else plan.wire
        )
        self.begun = 0
        # Two, as ranks may be at different vectors with one and the same step.
        self._gather = comm.Dup() if comm else comm
        self._scattering: deque[_Transfer] = deque()
        self._gathering: deque[_Transfer] = deque()
        self._buffers: dict[int, tuple[Array, Array]] = {}

    def begin(self, vector: Array) -> None:
        """Begin to replace a vector by the sum of all; in the same order on all."""
        number = self.begun
        self.begun += 1
        if not vector.size or self._comm.size == 1:
            return
        sent, received = buffers = self._room(number, vector)
        if sent is not vector:
            _narrow(vector, sent)
        counts, places = self._pieces(vector)
        mine = [received.shape[1] * sent.itemsize] * self._comm.size
        request = self._comm.Ialltoallv(
            [_bytes(sent), counts, places, MPI.BYTE],
            [_bytes(received), mine, None, MPI.BYTE],
        )
        self._scattering.append(_Transfer(request, vector, buffers))

    def _room(self, number: int, vector: Array) -> tuple[Array, Array]:
        """Return what is sent of a vector, and where the pieces of it arrive."""
        if number not in self._buffers:
            own = vector.dtype == self._dtype
            sent = vector if own else np.empty(vector.size, self._dtype)
            piece = self._mine(vector)
            received = np.empty((self._comm.size, piece.size), self._dtype)
            self._buffers[number] = sent, received
        return self._buffers[number]

    def _bounds(self, vector: Array) -> list[int]:
        size = self._comm.size
        return [vector.size * part // size for part in range(size + 1)]

    def _mine(self, vector: Array) -> Array:
        bounds = self._bounds(vector)
        return vector[bounds[self._comm.rank] : bounds[self._comm.rank + 1]]

    def _pieces(self, vector: Array) -> tuple[list[int], list[int]]:
        """Return bytes and byte offsets of all pieces of what is sent."""
        bounds = [bound * self._dtype.itemsize for bound in self._bounds(vector)]
        return [b - a for a, b in itertools.pairwise(bounds)], bounds[:-1]

    def progress(self) -> bool:
        """Go on with what has arrived; return whether nothing is under way."""
        while self._scattering and self._scattering[0].request.Test():
            self._sum(self._scattering.popleft())
        while self._gathering and self._gathering[0].request.Test():
            _, vector, (sent, _) = self._gathering.popleft()
            if sent is not vector:
                np.copyto(vector, sent)
        return not self._scattering and not self._gathering

    def _sum(self, transfer: _Transfer) -> None:
        _, vector, (sent, received) = transfer
        piece = self._mine(vector)
        with np.errstate(all="ignore"):
            add_in_order(list(received), piece, self.divisor, self._threads)
        if sent is not vector:
            _narrow(piece, self._mine(sent))
        request = self._gather.Iallgatherv(
            MPI.IN_PLACE, [_bytes(sent), *self._pieces(vector), MPI.BYTE]
        )
        self._gathering.append(_Transfer(request, vector, (sent, received)))

    def free(self) -> None:
        """Free the communicators. Collective."""
        self._buffers.clear()
        if self._comm:
            self._gather.Free()
            self._comm.Free()


def _narrow(wide: Array, narrow: Array) -> None:
    """Round to a narrower dtype; what is too large becomes infinity."""
    with np.errstate(all="ignore"):
        np.copyto(narrow, wide, casting="same_kind")


def _bytes(array: Array) -> Array:
    return array.reshape(-1).view(np.uint8)


def node_ranks(group: Group) -> list[list[int]]:
    """Return the ranks of each node, nodes in the order of their first. Collective."""
    first = group.node.bcast(group.rank)
    nodes: dict[int, list[int]] = {}
    for rank, node in enumerate(group.comm.allgather(first)):
        nodes.setdefault(node, []).append(rank)
    return list(nodes.values())
