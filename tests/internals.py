"""What tests need from the inside of the objects of hpcaccum.

A test holds a promise by public calls. Where these are not enough, it uses a function
of this module: to stop a writer halfway, to hold an agent still, or to learn what was
chosen. This is the only place that knows private attributes for the tests of
accumulators, servers and nodes, and it changes with them.

What returns a patch is used as ``with internals.limits(patience=0.03): ...``.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import pkgutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import numpy as np

from hpcaccum import deadline
from hpcaccum.accumulator import batch, sparse
from hpcaccum.accumulator.protocol import Request
from hpcaccum.mpi import Group
from hpcaccum.mpi.talk import control
from hpcaccum.nodes import Agent, Service, transfer
from hpcaccum.server import (
    node_update,
    orders,
    parameter_copies,
    publisher,
    wire_format,
)

_LIMITS: dict[str, tuple[Any, str]] = {
    # Seconds after which a rank asks whether those that it waits for come at all.
    "patience": (control, "_PATIENCE"),
    # Seconds for which an interrupted call, or a message, waits for the answer of an
    # agent; for which a take waits for sums of other nodes, also with less time left.
    "grace": (deadline, "_GRACE"),
    "sums": (batch, "_LEAST_SECONDS"),
    # Bytes of which agents send a vector at a time, and up to which ranks send it with
    # their request.
    "piece": (transfer, "_PIECE"),
    "short": (transfer, "SHORT"),
    # The log of changed rows has an entry for so many rows.
    "rows_of_entry": (parameter_copies, "SHARE"),
    # Elements of an update: of a chunk, of a piece (least and most), and for a thread.
    "chunk": (node_update, "_CHUNK"),
    "least": (node_update, "_LEAST"),
    "most": (node_update, "_MOST"),
    "thread": (node_update, "_THREAD"),
}


@contextlib.contextmanager
def limits(**values: float) -> Iterator[None]:
    """Change some numbers in the block; see the table above."""
    with contextlib.ExitStack() as stack:
        for name, value in values.items():
            stack.enter_context(mock.patch.object(*_LIMITS[name], value))
        yield


def _before(owner: Any, name: str, call: Callable[..., object]) -> Any:
    """Return a patch that calls something before a method, with its arguments."""
    method = getattr(owner, name)

    def changed(*args: Any, **options: Any) -> Any:
        call(*args)
        return method(*args, **options)

    return mock.patch.object(owner, name, changed)


def _after(owner: Any, name: str, call: Callable[..., object]) -> Any:
    """Return a patch that calls something after a method, with result and arguments."""
    method = getattr(owner, name)

    def changed(*args: Any, **options: Any) -> Any:
        result = method(*args, **options)
        call(result, *args)
        return result

    return mock.patch.object(owner, name, changed)


def around(place: str, act: Callable[[str, Any], object]) -> None:
    """Have a function below hpcaccum call ``act("before", args)``, and "after", too."""
    names, _, name = place.rpartition(".")
    owner = pkgutil.resolve_name(f"hpcaccum.{names}")
    call = getattr(owner, name)

    def changed(*args: Any, **options: Any) -> Any:
        act("before", args)
        result = call(*args, **options)
        act("after", args)
        return result

    setattr(owner, name, changed)


# Steps of an accumulator or optimizer, and the methods that make them.
_STEPS: dict[str, Callable[[Any], tuple[Any, str]]] = {
    # A gradient is admitted; the same of DropStaleGradientOptimizer.
    "admit": lambda owner: (_shared(owner).writer, "_admit"),
    "put": lambda optimizer: (optimizer._server.inbox, "put"),
    # After a push, of which the second argument is the receipt.
    "pushed": lambda optimizer: (optimizer, "_after"),
    # The gradients of a closed round are added; rows are copied to the device.
    "sum": lambda accumulator: (accumulator._storage, "total"),
    "deliver": lambda accumulator: (sparse, "_to_device"),
    # This rank's part of the center is updated; the piece that is its first argument.
    "update": lambda optimizer: (optimizer._server._updates, "update"),
    "piece": lambda optimizer: (optimizer._server._node_update, "_saving"),
    # With several servers: a question is sent to them; this rank waits for answers.
    "question": lambda optimizer: (optimizer._server._orders, "request"),
    "answers": lambda optimizer: (optimizer._server._orders, "_wait_for"),
}


def fail(step: str, owner: Any, error: type[BaseException]) -> Any:
    """Return a patch: on this rank a step raises before it is made; see the table."""
    return before(step, owner, mock.Mock(side_effect=error))


def before(step: str, owner: Any, call: Callable[..., object]) -> Any:
    """Return a patch: this rank calls something, with the arguments of a step."""
    return _before(*_STEPS[step](owner), call)


def fail_when_accepted(optimizer: Any, error: type[BaseException]) -> Any:
    """Return a patch: gradients of this rank are accepted, and then it raises."""
    failing = mock.Mock(side_effect=error)
    return _after(optimizer._server.inbox, "submit", failing)


# Accumulators


def admit(accumulator: Any, local_step: int = 0) -> Callable[[Any], None]:
    """Have a gradient of this rank admitted; return what writes it, later.

    Of an accumulator of float64 vectors of 2, to which this rank gives nothing else.
    """
    protocol, storage = accumulator._protocol, accumulator._storage
    shape = None if protocol.shapes.only else (2,)
    request = Request(local_step, 1.0, shape, None, (0, 0), False, False)
    calls, rank = accumulator._shared.calls, accumulator._shared.group.rank
    if near := calls is None or calls.near:
        admitted = protocol.admit(rank, request)
    else:
        admitted = calls.admit(request).result()
    assert admitted.receipt

    def write(gradient: Any) -> None:
        storage.write(admitted.parity, 0, np.array(gradient, float), 1.0, None)
        if near:
            protocol.arrive(rank, admitted)
        else:
            calls.arrive(admitted).result()

    return write


def is_in_line(accumulator: Any, rank: int) -> bool:
    """Return whether a take of a rank waits, for others or for gradients."""
    lock = accumulator._protocol.take_lock
    return bool(lock._words.read(lock._tickets + rank) > 0)


def take_waits(accumulator: Any) -> bool:
    """Return whether a take has its turn, and waits for gradients."""
    return bool(accumulator._protocol.state().waiting)


def limit_rounds(accumulator: Any, count: int) -> Any:
    """Return a patch: rounds hold at most so many gradients; on all ranks."""
    return mock.patch.object(accumulator._protocol.packing, "max_count", count)


def before_records(owner: Any, call: Callable[[], object]) -> Any:
    """Return a patch: this rank calls something before it publishes a gradient.

    The owner is an accumulator, or an initialized SyncReplicasOptimizer. If the call
    raises, the gradient, which is admitted, is a lost one.
    """
    shared = _shared(owner)
    mine = shared.group.rank
    if shared.calls is None or shared.calls.near:
        # The agent may publish those of other ranks.
        return _before(
            shared.protocol, "arrive", lambda rank, _: rank == mine and call()
        )
    return _before(shared.calls, "arrive", lambda _: call())


def _shared(owner: Any) -> Any:
    return owner._server.inbox if hasattr(owner, "_server") else owner._shared


# Optimizers with a server


def servers(optimizer: Any) -> tuple[int, ...]:
    """Return the ranks that hold the center."""
    return tuple(optimizer._server._servers)


def own_step(optimizer: Any) -> int:
    """Return the step of this rank's variables."""
    return int(optimizer._served[0].step)


def step_here(optimizer: Any) -> int:
    """Return the step of the parameters that this node has."""
    return int(optimizer._server._publisher.version())


def admitted_step(optimizer: Any) -> int:
    """Return the step that the next gradient is compared with; may be ahead."""
    return int(optimizer._server.inbox.global_step)


def left(optimizer: Any) -> list[int]:
    """Return the ranks that have left."""
    return list(optimizer._server.inbox.membership.left())


def gradient_bytes(optimizer: Any) -> int:
    """Return the memory of this rank for gradients."""
    return int(optimizer._server.inbox.parts.nbytes_here)


def reducer(optimizer: Any) -> Any:
    """Return the reducer of a CrossShardOptimizer, or of PyTorch's CrossShard."""
    return getattr(optimizer, "_exchange", optimizer)._shard.reducer


def note_memory(sizes: list[int]) -> Any:
    """Return a patch: the bytes of shared memory that this rank allocates."""
    return _before(os, "posix_fallocate", lambda *place: sizes.append(place[-1]))


def push(optimizer: Any, grads: Mapping[str, Any], step: int) -> Any:
    """Submit gradients by name, and do not wait for their update."""
    return optimizer._server.push(grads, step)


def wait_for(optimizer: Any, step: int) -> None:
    """Wait until a step is on this node."""
    optimizer._server.pull({}, at_least=step)


def missing(optimizer: Any, step: int) -> str:
    """Return what the message of a wait for a step would say now."""
    return str(optimizer._server._missing(step))


def admit_update(optimizer: Any) -> Callable[[], None]:
    """Have a gradient of DropStaleGradientOptimizer admitted; return what puts it."""
    queue, rank = optimizer._server.inbox, optimizer._group.rank
    receipt = queue.admit(rank, 0)
    assert receipt

    def put() -> None:
        queue.put(receipt, rank)
        queue.end_intent(rank)

    return put


def interrupt_pulls(name: str) -> Any:
    """Return a patch: pulls spoil a sparse variable, and are interrupted."""

    def spoil(_: Any, copier: Any, flat: Any, into: Any, *which: Any) -> None:
        into[name][...] = 77
        raise KeyboardInterrupt

    return _after(parameter_copies.Copier, "read", spoil)


def interrupt_order(error: type[BaseException]) -> Any:
    """Return a patch: one of several servers gets an order, and then it raises."""
    failing = mock.Mock(wraps=pickle)
    failing.loads.side_effect = error
    return mock.patch.object(orders, "pickle", failing)


def mend(optimizer: Any) -> None:
    """Have a server go on after an update that has failed, so that it can be freed."""
    optimizer._server._updates._broken = False


def pieces_done(optimizer: Any) -> int:
    """Return how many pieces of the update in progress are complete."""
    return int(optimizer._server._node_update._words.read(node_update._DONE))


def update_threads(optimizer: Any) -> int:
    """Return how many threads of this rank make pieces of an update."""
    return int(optimizer._server._node_update._threads)


def note_copies(shapes: list[Any]) -> Any:
    """Return a patch: the shapes of the gradients that pushes copy are appended."""
    return _before(
        wire_format, "copy_quietly", lambda place, _: shapes.append(place.shape)
    )


def note_rows(numbers: list[Any]) -> Any:
    """Return a patch: the number of rows of each copy of a table, or "all".

    Those of agents, between the two copies of a node, are not noted.
    """

    def note(source: Any, target: Any, rows: Any) -> None:
        if not threading.current_thread().name.startswith("agent"):
            numbers.append("all" if rows is None else rows.size)

    return _before(parameter_copies, "copy_rows", note)


def note_row_messages(sizes: list[int]) -> Any:
    """Return a patch: the bytes of each message with rows that this rank sends."""
    return _after(
        parameter_copies.RowMessage,
        "complete",
        lambda _, made, *which: sizes.append(made.data.size),
    )


def slow_reads(seconds: float) -> Any:
    """Return a patch: this rank pauses before it reads each variable of the center."""
    copier = parameter_copies.Copier
    read = copier.read

    def slowly(self: Any, flat: Any, into: Mapping[str, Any], since: Any) -> Any:
        has: dict[str, int] = {}
        for name, array in into.items():
            time.sleep(seconds)
            has |= read(self, flat, {name: array}, since)
        return has

    return mock.patch.object(copier, "read", slowly)


def slow_parts(seconds: float, rank: int | None = None) -> Any:
    """Return a patch: servers pause before each piece of parameters, to one leader."""
    send = vars(publisher)["send_pieces"]

    def slowly(comm: Any, to: int, *args: Any) -> Iterator[bool]:
        for done in send(comm, to, *args):
            end = time.monotonic() + seconds
            while rank in (None, to) and time.monotonic() < end:
                yield False
            yield done

    return mock.patch.object(publisher, "send_pieces", slowly)


def see_end_late(seconds: float) -> Any:
    """Return a patch: agents pause before they see that a server has got the end."""
    obey = orders.Orders._obey

    def slowly(self: Any, kind: int, *what: Any) -> Iterator[bool]:
        steps = obey(self, kind, *what)
        if kind == orders.END:
            yield next(steps)
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                yield False
        yield from steps

    return mock.patch.object(orders.Orders, "_obey", slowly)


# Nodes


def agent_of(group: Group) -> Any:
    """Return the agent of this rank's node, whose ``comm`` sends its messages."""
    return Agent.of(group)


@contextlib.contextmanager
def hold_agent(group: Group, node: int) -> Iterator[Callable[[], None]]:
    """Have the agent of a node do nothing; yield what ends that. Collective."""
    begun, go = threading.Event(), threading.Event()

    class Held(Service):
        def handle(self, source: int, *request: Any) -> Iterator[bool]:
            begun.set()
            go.wait()
            yield True

    agent = Agent.of(group)
    number = agent.add(Held())
    group.comm.Barrier()
    if group.rank == agent.leaders[node]:
        agent.request(agent.node, number)
        begun.wait()
    group.comm.Barrier()
    try:
        yield go.set
    finally:
        go.set()
        agent.remove(number, "held")
