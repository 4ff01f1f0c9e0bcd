"""Memory of each rank on its own node, of which any rank gets sums."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from hpcaccum.deadline import Deadline
from hpcaccum.dtypes import Array, quiet
from hpcaccum.errors import LostRankError
from hpcaccum.mpi import AtomicWords, Group, NodeMemory, keep
from hpcaccum.nodes.agent import Agent, Service, Steps
from hpcaccum.nodes.transfer import (
    Incoming,
    Narrowing,
    Piece,
    buffers_for,
    is_short,
    length,
    pieces_of,
    send_pieces,
)
from hpcaccum.spans import traced
from hpcaccum.summation import add_in_order

# Words of a node: how many sums its ranks have asked for; the number of the one that is
# complete, negative if it has failed; the node whose sum the agent waits for, plus 1.
_ASKED, _DONE, _AWAITED = range(3)


class Place(NamedTuple):
    """A vector in the part of a rank.

    Attributes:
        rank: The rank.
        begin: The byte where it begins.
        factor: What multiplies it in sums.
    """

    rank: int
    begin: int
    factor: float = 1.0


class LostNodeError(LostRankError):
    """Raised for a sum of vectors of which a node has some, and is lost."""


class NodeParts(Service):
    """One part of memory per rank, which the ranks of its node have mapped. Collective.

    All bytes are 0 at first. `AtomicWords` order the stores of a rank with the loads of
    other ranks, also through an agent.

    Args:
        group, nbytes, what: The ranks; the size of a part; the name for messages.
        takers: The ranks that call `sum`; by default all.
        longest: Bytes of the longest vector that it is called for; by default a part.

    Attributes:
        mapped: Whether all ranks have all parts mapped, so that none needs `sum`.
        nbytes_here: Bytes in this rank's memory.
        sends_short: Whether ranks may send short vectors to an agent that keeps copies.
        narrowing: How sums of vectors of its dtype travel; by default as they are.

    Raises:
        InvalidArgumentError: On every rank, if a node has too little memory, or MPI
            provides no THREAD_MULTIPLE between nodes.
    """

    def __init__(
        self,
        group: Group,
        nbytes: int,
        what: str,
        takers: Sequence[int] | None = None,
        longest: int | None = None,
    ) -> None:
        self._group, self._what = group, what
        nbytes = self._nbytes = max(1, -(-nbytes // 64)) * 64
        self.mapped = group.single_node
        inside = group if self.mapped else group.inside
        ranks = range(group.size) if self.mapped else group.node_ranks
        takes = takers is None or not set(takers).isdisjoint(ranks)
        longest = nbytes if longest is None else longest
        common = longest if takes and not self.mapped else 0
        stripes = [slice(0, common)] if inside.rank == 0 else []
        self.nbytes_here = nbytes + common * (inside.rank == 0)
        memory = NodeMemory(inside, [nbytes] * inside.size, common, stripes)
        self._parts = dict(zip(ranks, memory.parts, strict=True))
        # The last sum, in memory of the whole node.
        self._result = memory.common
        self.sends_short = not self.mapped
        self.narrowing: Narrowing | None = None
        # On a leader: copies of what is in the parts of ranks on other nodes.
        self._kept: dict[int, Array] = {}
        if self.mapped:
            return
        with contextlib.ExitStack() as undo:
            self._words = AtomicWords(inside, 0, 3)
            undo.callback(self._words.free)
            agent = Agent.of(group)
            undo.pop_all()
        # Whether the agent writes a result, which a rank may have given up meanwhile.
        self._collecting = False
        agent.add(self)
        group.allgather(None, f"{what}: memory of nodes")

    @property
    def own(self) -> Array:
        """All bytes of this rank's part."""
        return self._parts[self._group.rank]

    def is_here(self, rank: int) -> bool:
        """Whether this rank has the part of another one mapped."""
        return rank in self._parts

    def is_lost(self, rank: int) -> bool:
        """Whether the part of a rank lies on a node that is lost."""
        return not self.mapped and self.agent.is_gone(self._group.node_of[rank])

    def view(self, place: Place, count: int, dtype: np.dtype[Any]) -> Array:
        """Return elements of a part of this node, or of a copy, as a view."""
        rank, offset, _ = place
        part = self._parts[rank] if rank in self._parts else self._kept[rank]
        return part[offset : offset + count * dtype.itemsize].view(dtype)

    def is_sent(self, nbytes: int) -> bool:
        """Whether ranks may send vectors of this size to an agent that keeps copies."""
        return self.sends_short and is_short(nbytes)

    def keep(self, place: Place, contents: bytes) -> None:
        """Keep a copy of a vector of a rank on another node; for an agent."""
        rank, offset, _ = place
        if rank not in self._kept:
            self._kept[rank] = np.empty(self._nbytes, np.uint8)
        data = np.frombuffer(contents, np.uint8)
        self._kept[rank][offset : offset + data.size] = data

    def sum(
        self,
        places: Sequence[Place],
        count: int,
        dtype: np.dtype[Any],
        divisor: float,
        deadline: Deadline,
        copied: Collection[int] = (),
    ) -> Array:
        """Return the sum of vectors in parts of any nodes, divided by ``divisor``.

        The vectors of a node, times their factors, are added in their order, that of
        the ranks, then the sums of the nodes in the order of the nodes. Each node but
        this one sends one vector, unless the agent of this node has copies of those of
        the ranks in ``copied``. If nothing is sent, and the agent is a thread of this
        rank, this call adds the vectors itself.

        The result is valid until the next sum of a rank of this node. Raises
        WaitTimeoutError, or LostNodeError if another node is lost.
        """
        if self.agent.is_leader and (here := self._all_here(places, copied)):
            return self._sum_here(here, count, dtype, divisor)
        words = self._words
        number = words.read(_ASKED) + 1
        # From now on, the agent begins no earlier sum, which was given up.
        words.write(_ASKED, number)
        order = number, list(places), count, dtype.str, divisor, {*copied}
        self.tell([self.agent.node], "collect", *order)
        self.agent.waiting.wait(
            lambda: abs(words.read(_DONE)) == number, deadline, self._missing
        )
        if words.read(_DONE) < 0:
            raise LostNodeError
        return self._result[: count * dtype.itemsize].view(dtype)

    def short_sum(
        self,
        places: Sequence[Place],
        count: int,
        dtype: np.dtype[Any],
        copied: Collection[int],
    ) -> bytes | None:
        """Return the sum of vectors if it is short and an agent has all; else None."""
        nbytes = count * dtype.itemsize
        if not (self.is_sent(nbytes) and (here := self._all_here(places, copied))):
            return None
        return self._sum_here(here, count, dtype, 1).tobytes()

    def _sum_here(
        self,
        nodes: Sequence[Sequence[Place]],
        count: int,
        dtype: np.dtype[Any],
        divisor: float,
    ) -> Array:
        whole, out = [slice(0, count)], np.empty(count, dtype)
        with quiet():
            sums = [self._sum_of(there, whole, np.empty_like(out)) for there in nodes]
            add_in_order(sums, out, divisor)
        return out

    def _sum_of(self, places: Sequence[Place], piece: Piece, total: Array) -> Array:
        """Return a piece of the sum of vectors of this node, maybe as a view of one."""
        vectors = [self.view(place, piece[-1].stop, total.dtype) for place in places]
        factors = [place.factor for place in places]
        if len(vectors) == len(piece) == 1 and factors == [1]:
            return vectors[0][piece[0]]
        begin = 0
        for each in piece:
            parts = [vector[each] for vector in vectors]
            end = begin + parts[0].size
            add_in_order(parts, total[begin:end], factors=factors)
            begin = end
        return total

    def _missing(self) -> str:
        node, agent = self._words.read(_AWAITED) - 1, self.agent
        # Its own if it waits for none.
        return f"the sum of {agent.describe([agent.node if node < 0 else node])}"

    def by_node(self, places: Sequence[Place]) -> dict[int, list[Place]]:
        """Return the places on each node that has some, in the order of nodes."""
        found: dict[int, list[Place]] = {}
        for place in places:
            found.setdefault(self._group.node_of[place.rank], []).append(place)
        return dict(sorted(found.items()))

    # The agent

    def _do_send(self, rank: int, places: list[Place], count: int, name: str) -> Steps:
        whole = [slice(0, count)]
        return self.sending(rank, self.tag(), places, np.dtype(name), whole)

    def _do_collect(
        self,
        number: int,
        places: list[Place],
        count: int,
        name: str,
        divisor: float,
        copied: set[int],
    ) -> Steps:
        """Set the result to a sum over nodes."""
        while self._collecting:
            yield False
        if number < self._words.read(_ASKED):
            return
        self._collecting = True
        dtype, mine = np.dtype(name), self.agent.leaders[self.agent.node]
        for node, there in self.by_node(places).items():
            if not self._has(node, there, copied):
                self.tell([node], "send", mine, there, count, name)
        result = self._result[: count * dtype.itemsize].view(dtype)
        whole, tag = [slice(0, count)], self.tag()
        try:
            yield from self.collecting(tag, places, whole, divisor, result, copied)
        except LostNodeError:
            number = -number
        self._collecting = False
        self._words.write(_DONE, number)

    def _narrows(self, dtype: np.dtype[Any]) -> Narrowing | None:
        """Return how sums of a dtype travel, if not as they are."""
        found = self.narrowing
        return found if found is not None and found.dtype == dtype else None

    def _has(self, node: int, places: Sequence[Place], copied: Collection[int]) -> bool:
        """Whether this agent has all vectors of a node, or copies."""
        return node == self.agent.node or all(p.rank in copied for p in places)

    def _all_here(
        self, places: Sequence[Place], copied: Collection[int]
    ) -> Sequence[Sequence[Place]]:
        """Return vectors by node if this agent has all of them; else nothing."""
        nodes = self.by_node(places)
        here = all(self._has(node, there, copied) for node, there in nodes.items())
        return list(nodes.values()) if here else []

    @traced("receive")
    def collecting(
        self,
        tag: int,
        places: Sequence[Place],
        ranges: Sequence[slice],
        divisor: float,
        out: Array,
        copied: Collection[int] = (),
    ) -> Steps:
        """Set ``out`` to ranges of a sum over nodes, each of which sends its own.

        The ranges lie one after the other in ``out``. Nodes of which all vectors are
        copied send nothing. It raises LostNodeError if one of the others is lost.
        """
        dtype, position = out.dtype, 0
        here: dict[int, Iterator[Array]] = {}
        incoming: dict[int, Incoming] = {}
        comm, leaders, nodes = self.agent.comm, self.agent.leaders, self.by_node(places)
        narrowing = self._narrows(dtype)
        for node, there in nodes.items():
            if self._has(node, there, copied):
                here[node] = self._pieces_here(there, ranges, dtype)
            else:
                buffers = (
                    buffers_for(ranges, dtype)
                    if narrowing is None
                    else narrowing.buffers(ranges)
                )
                incoming[node] = Incoming(comm, leaders[node], tag, buffers)
        for piece in pieces_of(ranges, dtype.itemsize):
            # While the others travel.
            parts = {node: next(pieces) for node, pieces in here.items()}
            try:
                arrived = yield from self._first_of(incoming)
            except LostNodeError:
                yield from self._discard(incoming)
                raise
            if narrowing is not None:
                unpack = narrowing.unpack
                arrived = {n: unpack(data, piece) for n, data in arrived.items()}
            parts |= arrived
            end = position + length(piece)
            add_in_order([parts[node] for node in nodes], out[position:end], divisor)
            position = end
            for each in incoming.values():
                each.take()
            yield True
        self._words.store_unordered(_AWAITED, 0)

    def _discard(self, incoming: Mapping[int, Incoming]) -> Steps:
        """Receive what other nodes send, so that no later sum receives it."""
        for node, each in incoming.items():
            # MPI may still write to the memory of a message that never comes.
            keep(each)
            yield from each.taking(functools.partial(self.agent.is_gone, node))

    def _first_of(
        self, incoming: Mapping[int, Incoming]
    ) -> Generator[bool, None, dict[int, Array]]:
        """Wait until the sums of other nodes have their next piece; return them."""
        parts: dict[int, Array] = {}
        for node, each in incoming.items():
            if each.first() is None:
                # For messages only.
                self._words.store_unordered(_AWAITED, node + 1)
            while (part := each.first()) is None:
                if self.agent.is_gone(node):
                    raise LostNodeError
                yield False
            parts[node] = part
        return parts

    def _pieces_here(
        self, places: Sequence[Place], ranges: Sequence[slice], dtype: np.dtype[Any]
    ) -> Iterator[Array]:
        """Yield the pieces of ranges of the sum of vectors of this node."""
        buffers = buffers_for(ranges, dtype)
        for piece in pieces_of(ranges, dtype.itemsize):
            yield self._sum_of(places, piece, next(buffers))

    @traced("send", lambda args, _: {"to": args[1]})
    def sending(
        self,
        rank: int,
        tag: int,
        places: Sequence[Place],
        dtype: np.dtype[Any],
        ranges: Sequence[slice],
    ) -> Steps:
        """Send ranges of the sum of vectors of this node to the agent of a rank."""
        pieces = self._pieces_here(places, ranges, dtype)
        if (narrowing := self._narrows(dtype)) is not None:
            pieces = map(narrowing.pack, pieces, pieces_of(ranges, dtype.itemsize))
        return send_pieces(self.agent.comm, rank, tag, pieces)

    def free(self) -> None:
        """Free the memory. Collective. Views stay valid."""
        if not self.mapped:
            self.agent.remove(self.number, f"{self._what}: free")
            self._words.free()
        self._parts, self._result = {}, np.empty(0, np.uint8)
        self._kept.clear()
