"""Sums over several nodes: inside each node first, then between nodes."""

from __future__ import annotations

import itertools
import math
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hpcaccum.device import copy_quietly
from hpcaccum.dtypes import Array, accumulation_dtype
from hpcaccum.mpi import MPI, duplicate, split
from hpcaccum.reducer.schedule import Call, MessageSchedule, Numbers, Plan
from hpcaccum.reducer.two_shot import NodeSum
from hpcaccum.summation import add_in_order

if TYPE_CHECKING:
    from mpi4py import MPI as mpi4py_MPI


class Hierarchical(MessageSchedule):
    """Stripes are summed inside each node, then between the nodes.

    The order of summation is fixed: ranks in their order inside a node, then nodes in
    the order of their first ranks.
    """

    name = "hierarchical"
    takes_wire_dtype = True

    def __init__(self, plan: Plan) -> None:
        group = plan.group
        nodes = group.nodes
        # With nodes of different size, some ranks of the larger ones sum nothing.
        summing = min(map(len, nodes))
        self._inside = group.split(nodes)
        place = self._inside.rank
        number = group.node_number
        color = place if place < summing else MPI.UNDEFINED
        peers = split(group.comm, color, number)
        self._peers = Peers(peers, plan)
        wait = plan.wait.moving_data(self._progress)
        inside = plan._replace(group=self._inside, wait=wait)
        kind = NodeSum if plan.wire_dtype is None else ScaledSum
        self._sum = kind(inside, summing)
        super().__init__(plan, self._sum.sent, self._sum.received)
        self.result_bytes = self._sum.result_bytes

    def _progress(self) -> None:
        self._peers.progress()
        self._comm.Iprobe()

    def prepare(self, weight: float, *, mean: bool, scales: bool) -> None:
        """Do as `Schedule.prepare`."""
        super().prepare(weight, mean=mean, scales=scales)
        self._sum.prepare(weight, mean=False, scales=scales)

    def offer(self, count: int) -> None:
        """Sum inside the node what all its ranks have contributed, and send it."""
        self._sum.offer(count)
        self._send()

    def _send(self) -> None:
        for number in range(self._peers.begun, self._sum.summed):
            node = self._sum.total_weight, self._sum.divisor
            self._peers.begin(self._sum.stripes[number], node, mean=self.mean)
        self._peers.progress()

    def complete(self, call: Call) -> bool:
        """Sum the other buckets, and compare the signatures."""
        while self._sum.summed < len(self.buckets):
            self._sum.sum_next()
            self._send()
        agreed = self._agree(call.signature, self._peers.progress)
        # Inside a node all pass the same signature: that covers all nodes.
        self._sum.report(0)
        self._sum.end(0)
        self._peers.end()
        # Not earlier: a bucket is complete when all ranks of the node have reported.
        if call.reduced is not None:
            for number in range(len(self.buckets)):
                call.reduced(number)
        return agreed

    def free(self, *, abandoned: bool = False) -> None:
        """Do as `Schedule.free`."""
        self._sum.free()
        if not abandoned:
            self._peers.free()
        super().free(abandoned=abandoned)
        self._inside.free()


class ScaledSum(NodeSum):
    """Sums that are as large as without weights, to travel in a narrower dtype."""

    def _combine(self, weights: Numbers, factors: Numbers) -> tuple[Numbers, float]:
        # A power of 2 changes no bit.
        mean = sum(weights) / len(weights)
        return factors, math.ldexp(0.5, math.frexp(mean)[1])


class _Transfer(NamedTuple):
    request: Any
    vector: Array
    mean: bool
    buffers: tuple[Array, Array]


class Peers:
    """Sums of vectors over ranks of different nodes, in the order of the ranks.

    Each rank receives a piece of the vector of every rank, sums these pieces, and sends
    the sum to all: a reduce-scatter and an allgather. This moves no more bytes than the
    best allreduce, and fixes the order of summation.

    `begun` is how many vectors were begun in this call. ``comm`` is COMM_NULL on a rank
    that takes no part.
    """

    def __init__(self, comm: mpi4py_MPI.Intracomm, plan: Plan) -> None:
        self._comm, self.begun = comm, 0
        self._threads = plan.group.own_cores
        own = accumulation_dtype(plan.layout.dtype)
        self._dtype = own if plan.wire_dtype is None else plan.wire_dtype
        # Two communicators, as ranks may be at different vectors in the same step.
        self._gather = duplicate(comm) if comm else comm
        self._scattering: deque[_Transfer] = deque()
        self._gathering: deque[_Transfer] = deque()
        self._buffers: dict[int, tuple[Array, Array]] = {}
        # What each rank's node has summed in this call; see `begin`.
        self._nodes = np.empty((0, 2))
        self._exchange: Any = None

    def begin(self, vector: Array, node: tuple[float, float], *, mean: bool) -> None:
        """Begin to replace a vector by the sum over all ranks, or by their mean.

        All ranks begin their vectors in the same order. A vector is the weighted sum of
        a node over a divisor; ``node`` has the sum of these weights, and this divisor.
        """
        number = self.begun
        self.begun += 1
        if not vector.size or self._comm.size == 1:
            return
        if self._exchange is None:
            self._nodes = np.empty((self._comm.size, 2))
            self._nodes[self._comm.rank] = node
            self._exchange = self._comm.Iallgather(MPI.IN_PLACE, self._nodes)
        sent, received = buffers = self._room(number, vector)
        if sent is not vector:
            copy_quietly(sent, vector)
        counts, places = self._pieces(vector)
        mine = [received.shape[1] * sent.itemsize] * self._comm.size
        request = self._comm.Ialltoallv(
            [_bytes(sent), counts, places, MPI.BYTE],
            [_bytes(received), mine, None, MPI.BYTE],
        )
        self._scattering.append(_Transfer(request, vector, mean, buffers))

    def _room(self, number: int, vector: Array) -> tuple[Array, Array]:
        """Return the buffers to send a vector from, and to receive its pieces in."""
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
        """Return sizes and offsets in bytes of the pieces of a vector to send."""
        bounds = [bound * self._dtype.itemsize for bound in self._bounds(vector)]
        return [b - a for a, b in itertools.pairwise(bounds)], bounds[:-1]

    def progress(self) -> bool:
        """Continue what has arrived; return whether nothing is under way."""
        while (
            self._scattering
            and self._exchange.Test()
            and self._scattering[0].request.Test()
        ):
            self._sum(self._scattering.popleft())
        while self._gathering and self._gathering[0].request.Test():
            _, vector, _, (sent, _) = self._gathering.popleft()
            if sent is not vector:
                np.copyto(vector, sent)
        return not self._scattering and not self._gathering

    def _sum(self, transfer: _Transfer) -> None:
        _, vector, mean, (sent, received) = transfer
        piece, (weights, divisors) = self._mine(vector), self._nodes.T.tolist()
        divisor = sum(weights) if mean else 1.0
        with np.errstate(all="ignore"):
            add_in_order(list(received), piece, divisor, self._threads, divisors)
        if sent is not vector:
            copy_quietly(self._mine(sent), piece)
        request = self._gather.Iallgatherv(
            MPI.IN_PLACE, [_bytes(sent), *self._pieces(vector), MPI.BYTE]
        )
        self._gathering.append(_Transfer(request, vector, mean, (sent, received)))

    def end(self) -> None:
        """Note that all vectors of a call are complete."""
        self.begun, self._exchange = 0, None

    def free(self) -> None:
        """Free the communicators. Collective."""
        self._buffers.clear()
        if self._comm:
            self._gather.Free()
            self._comm.Free()


def _bytes(array: Array) -> Array:
    return array.reshape(-1).view(np.uint8)
