"""What several servers get from the root: their part at the start, then orders."""

from __future__ import annotations

import contextlib
import functools
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcaccum.deadline import Deadline
from hpcaccum.device import to_host
from hpcaccum.errors import EverybodyLeftError
from hpcaccum.mpi import AtomicWords, complete, memory_of_rank, number_of
from hpcaccum.nodes import Agent
from hpcaccum.server.double_buffer import step_of
from hpcaccum.server.order_agent import (
    ANSWER,
    ANSWERS,
    ASSIGN,
    BUFFER,
    DONE,
    END,
    KIND,
    ORDER,
    PARAMETERS,
    QUESTIONS,
    UPDATE,
    WORDS,
    OrderAgent,
)
from hpcaccum.server.part import Order, OwnPart
from hpcaccum.server.questions import Questions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from hpcaccum.dtypes import Array
    from hpcaccum.mpi import Group
    from hpcaccum.nodes import NodeParts
    from hpcaccum.server.part import Part
    from hpcaccum.server.publisher import Publisher
    from hpcaccum.server.wire_format import WireFormat


class Orders:
    """Where the loop of each of several servers gets its updates. Collective.

    They begin with the ``initial`` arrays of the root. At most ``most`` steps may be
    ordered and not made. For other arguments see `ParameterServer` and `OrderAgent`.

    Attributes:
        own: The part of this rank, if it is a server.
        buffers: The most steps that may be ordered and not yet made. A server has
            memory for the gradients of each, but in all for no more than a whole one.
        questions: Of the root to the servers.
        answer: Called with a question of the root; returns the answer.
        assign: Called with a version that has the values which were kept.
    """

    adds = False

    def __init__(
        self,
        group: Group,
        servers: Sequence[int],
        wire: WireFormat,
        initial: Mapping[str, Array],
        parts: Sequence[Part],
        gradients: NodeParts,
        publisher: Publisher,
        what: str,
        *,
        most: int,
    ) -> None:
        self._servers, self._parts, self._what = servers, parts, what
        self._names, self.publisher = list(wire.parameters), publisher
        longest = max(each.part.stop - each.part.start for each in parts)
        self.buffers = min(most, max(1, round(wire.parameters.size / max(1, longest))))
        self.answer: Callable[[Any], Any] = lambda _: None
        self.assign: Callable[[int], object] = lambda _: None
        # On a server: the last order that was carried out, and whether it ended all.
        self._number, self._ended = 0, False
        with contextlib.ExitStack() as undo:
            self._words = AtomicWords(group.inside, 0, WORDS)
            undo.callback(self._words.free)
            memory = self._allocate(group, publisher.copies.dtype)
            self._agent = Agent.of(group)
            undo.pop_all()
        self._service = OrderAgent(
            self._agent, parts, memory, gradients, publisher, self._words
        )
        tags = self._service.tag(QUESTIONS), self._service.tag(ANSWERS)
        ask = functools.partial(self.request, "all_obey", ANSWER)
        self.questions = Questions(self._agent.comm, servers, tags, ask)
        self.own: OwnPart | None = None
        first = self._scatter(wire, initial)
        if first is not None:
            assert memory is not None
            assert publisher.own is not None
            part = parts[servers.index(group.rank)]
            self.own = OwnPart(part, publisher.own, memory, first)
        # No order comes before its server is there.
        group.allgather(None, f"{what}: servers")

    def _allocate(self, group: Group, dtype: Any) -> Array | None:
        """Make the memory for gradients of the server of this node, if it has one."""
        number, self.window_bytes = self.publisher.number, 0
        if number is None:
            return None
        server = self._servers[number]
        size = sum(each.stop - each.start for each in self._parts[number].ranges)
        nbytes = self.buffers * size * dtype.itemsize
        if server == group.rank:
            self.window_bytes = nbytes
        rank = group.node_ranks.index(server)
        memory: Array = memory_of_rank(group.inside, rank, nbytes).view(dtype)
        return memory.reshape(self.buffers, size)

    def _scatter(self, wire: WireFormat, initial: Mapping[str, Array]) -> Array | None:
        """Send each server its part of the root's parameters; return it. Collective."""
        comm, tag = self._agent.comm, self._service.tag(PARAMETERS)
        begun, mine = [], None
        dtype = wire.parameters.dtype
        if comm.rank == self._servers[0]:
            flat = np.empty(wire.parameters.size, dtype)
            arrays = {name: to_host(array) for name, array in initial.items()}
            wire.write_parameters(arrays, flat)
            for rank, each in zip(self._servers, self._parts, strict=True):
                begun.append(comm.Isend(flat[each.part], rank, tag))
        if comm.rank in self._servers:
            part = self._parts[self._servers.index(comm.rank)].part
            mine = np.empty(part.stop - part.start, dtype)
            begun.append(comm.Irecv(mine, self._servers[0], tag))
        complete(begun, self._start, self._starting)
        return mine

    def divide(
        self, arrays: Mapping[str, Mapping[str, Any]]
    ) -> dict[str, dict[str, Any]] | None:
        """Send each server its part of arrays of the root; return it. Collective."""
        # There are no questions yet; parameters may be on their way.
        comm, tag = self._agent.comm, self._service.tag(QUESTIONS)
        mine: list[Any] = []

        def exchange() -> Iterator[Any]:
            """Yield the requests of the root, and receive what a server gets."""
            if comm.rank == self._servers[0]:
                for rank, each in zip(self._servers, self._parts, strict=True):
                    for name in self._names:
                        yield comm.isend(each.pieces(name, arrays[name]), rank, tag)
            if comm.rank in self._servers:
                for _ in self._names:
                    found = self._start.wait(
                        lambda: comm.improbe(self._servers[0], tag), self._starting
                    )
                    mine.append(found.recv())

        complete(exchange(), self._start, self._starting)
        if self.own is None:
            return None
        names = self.own.arrays
        return {n: m for n, m in zip(self._names, mine, strict=True) if n in names}

    @property
    def _start(self) -> Deadline:
        return Deadline(None, f"{self._what}: start of servers")

    def _starting(self) -> str:
        return f"host rank {self._servers[0]} and the servers"

    def request(self, kind: str, *request: Any) -> None:
        """Send a request to the agent of this node."""
        self._service.tell([self._agent.node], kind, *request)

    # A server

    @contextlib.contextmanager
    def next(self, step: int, deadline: Deadline) -> Iterator[Order]:
        """Wait for the next update; carry out orders of other kinds before it."""
        while not self._ended:
            number, order = self._next_order(deadline)
            kind, detail, factor, version, buffer = order
            if kind == ANSWER:
                limit = Deadline(None, f"{self._what}: server")
                self.questions.answer(self.answer, detail, limit)
            elif kind == ASSIGN:
                self.assign(version)
            elif kind != END:
                rate = number_of(detail)
                yield Order(
                    step_of(version) - 1,
                    buffer if kind == UPDATE else None,
                    number_of(factor),
                    None if math.isnan(rate) else rate,
                )
            self._ended = kind == END
            self._number = number
            self._words.write(DONE, number)
            self._agent.wake()
            if kind not in (ANSWER, ASSIGN, END):
                return
        raise EverybodyLeftError(f"{self._what}: the host has ended all servers")

    def _next_order(self, deadline: Deadline) -> tuple[int, list[int]]:
        """Return the number of the next order, and its words from KIND on."""
        read, last = self._words.read, self._number
        self.publisher.changed.wait(
            lambda: read(ORDER) > last, deadline, lambda: "an order"
        )
        return read(ORDER), self._words.read_range(KIND, BUFFER + 1 - KIND)

    def awaited(self, step: int) -> str:
        """Return what the update of a step lacks."""
        return f"an order of host rank {self._servers[0]}"

    def come_back(self) -> None:
        """Let the loop of this server, which the root has ended, go on."""
        self._ended = False

    def free(self) -> None:
        """Free the memory, after the last update. Collective."""
        # The last question has made all ranks receive what was sent before it.
        Deadline(None, f"{self._what}: free").wait(
            lambda: self.questions.are_received() or None,
            lambda: "servers to receive questions, and the host answers",
        )
        self._service.free(f"{self._what}: free")
        self._words.free()
