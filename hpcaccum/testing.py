"""What the tests of hpcaccum need from the inside of its objects; not for programs.

A test holds a promise by public calls. Where these are not enough, it uses a function
of this module: to stop a writer halfway, to hold an agent still, or to learn what was
chosen. This is the only place that knows private attributes for the tests of
accumulators, servers and nodes, and it changes with them. No module imports it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np

from hpcaccum.accumulator import batch, sparse
from hpcaccum.accumulator.state import Record
from hpcaccum.mpi import control
from hpcaccum.nodes import Agent, transfer
from hpcaccum.server import (
    node_update,
    parameter_copies,
    row_draft,
    server_orders,
    wire_format,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from hpcaccum.mpi import Group

# Accumulators


def admit(accumulator: Any, local_step: int = 0) -> Callable[[Any], None]:
    """Have a gradient of this rank admitted; return what writes it, later.

    Of an accumulator of float64 vectors, to which this rank gives nothing else.
    """
    protocol, storage = accumulator._protocol, accumulator._storage
    receipt, parity, _ = protocol.admit(np.zeros(2), local_step)
    assert receipt
    protocol.words.flush()

    def write(gradient: Any) -> None:
        storage.write(parity, 0, np.array(gradient, float), True)
        protocol.put_record(parity, Record(0, 1, 0, 0), None)
        protocol.end_intent()

    return write


def is_in_line(accumulator: Any, rank: int) -> bool:
    """Return whether a take of a rank waits, for others or for gradients."""
    lock = accumulator._protocol.take_lock
    return bool(lock._words.read(lock._places + rank) > 0)


def take_waits(accumulator: Any) -> bool:
    """Return whether a take has its turn, and waits for gradients."""
    return bool(accumulator._protocol.state().waiting)


def fail_to_sum(accumulator: Any, error: type[Exception]) -> Any:
    """Have takes of this rank raise in the block, when their round is closed."""
    return mock.patch.object(accumulator._storage, "total", side_effect=error)


def fail_to_deliver(error: type[Exception]) -> Any:
    """Have takes of rows raise in the block, before the rows are on the device."""
    return mock.patch.object(sparse, "_to_device", side_effect=error)


def limit_rounds(accumulator: Any, count: int) -> Any:
    """Have rounds hold at most so many gradients in the block, on all ranks."""
    return mock.patch.object(accumulator._protocol.packing, "max_count", count)


def before_records(owner: Any, call: Callable[[], object]) -> Any:
    """Call something before this rank publishes an admitted gradient, in the block.

    Args:
        owner: An accumulator, or an initialized SyncReplicasOptimizer.
        call: Has the gradient be lost if it raises.
    """
    protocol = _accumulator(owner)._protocol
    put_record = protocol.put_record

    def late(*args: Any) -> Any:
        call()
        return put_record(*args)

    return mock.patch.object(protocol, "put_record", late)


def _accumulator(owner: Any) -> Any:
    return owner._server._inbox._accumulator if hasattr(owner, "_server") else owner


def fail_to_admit(owner: Any, error: type[Exception]) -> Any:
    """Have gradients of this rank raise in the block, before they are admitted."""
    writer = _accumulator(owner)._shared.writer
    return mock.patch.object(writer, "_possible", side_effect=error)


def fail_to_put(optimizer: Any, error: type[BaseException]) -> Any:
    """Have gradients of DropStaleGradientOptimizer be admitted, and then raise."""
    return mock.patch.object(optimizer._server._inbox._queue, "put", side_effect=error)


def least_time_of_sums(seconds: float) -> Any:
    """Have takes wait for sums of other nodes for so long, also with less time left."""
    return mock.patch.object(batch, "_LEAST_SECONDS", seconds)


# Optimizers with a server


def servers(optimizer: Any) -> tuple[int, ...]:
    """Return the ranks that hold the center."""
    return tuple(optimizer._server._servers)


def own_step(optimizer: Any) -> int:
    """Return the step of this rank's variables."""
    return int(optimizer._step)


def admitted_step(optimizer: Any) -> int:
    """Return the step that the next gradient is compared with; may be ahead."""
    inbox = optimizer._server._inbox
    quorum = getattr(inbox, "_accumulator", None)
    return int(inbox.step if quorum is None else quorum.global_step)


def left(optimizer: Any) -> list[int]:
    """Return the ranks that have left."""
    return list(optimizer._server._inbox.left())


def gradient_bytes(optimizer: Any) -> int:
    """Return the memory of this rank that holds gradients."""
    return int(optimizer._server._inbox.window_bytes)


def after_pushes(optimizer: Any, call: Callable[[Any], object]) -> None:
    """Call something with each receipt, before this rank waits for the update."""
    after = optimizer._after

    def late(server: Any, receipt: Any) -> None:
        call(receipt)
        after(server, receipt)

    optimizer._after = late


def shared_bytes(optimizer: Any) -> int:
    """Return the memory of this rank that holds gradients and parameters for others."""
    return int(optimizer._server.window_bytes)


def admit_update(optimizer: Any) -> Callable[[], None]:
    """Have a gradient of DropStaleGradientOptimizer admitted; return what puts it."""
    queue, rank = optimizer._server._inbox._queue, optimizer._group.rank
    assert queue.admit(rank, 0)

    def put() -> None:
        queue.put(0, rank)
        queue.end_intent(rank)
        queue.words.flush()

    return put


def push(optimizer: Any, grads: Mapping[str, Any], step: int) -> Any:
    """Submit gradients by name, and do not wait for their update."""
    return optimizer._server.push(grads, step)


def wait_for(optimizer: Any, step: int) -> None:
    """Wait until a step is on this node."""
    optimizer._server.pull({}, at_least=step)


def missing(optimizer: Any, step: int) -> str:
    """Return what the message of a wait for a step would say now."""
    return str(optimizer._server._missing(step))


def before_updates(optimizer: Any, call: Callable[[], object]) -> None:
    """Call something before each update of this rank's part of the center."""
    role = optimizer._server._role
    shard = getattr(role, "shard", role)
    update = shard.update

    def late(*args: Any) -> Any:
        call()
        return update(*args)

    shard.update = late


def note_pieces(
    optimizer: Any, before: Callable[[int], object] = lambda piece: None
) -> list[int]:
    """Return a list of the pieces of updates that this rank makes from now on."""
    update, pieces = optimizer._server._node_update, list[int]()
    work_on = update._work_on

    def noted(piece: int, given: Any) -> None:
        before(piece)
        pieces.append(piece)
        work_on(piece, given)

    update._work_on = noted
    return pieces


def pieces_done(optimizer: Any) -> int:
    """Return how many pieces of the update in progress are complete."""
    return int(optimizer._server._node_update._words.read(node_update._DONE))


def update_threads(optimizer: Any) -> int:
    """Return how many threads of this rank make pieces of an update."""
    return int(optimizer._server._node_update._threads)


@contextlib.contextmanager
def short_pieces(elements: int = 96, thread: int | None = None) -> Iterator[None]:
    """Divide also updates of so many elements, of which ``thread`` wake a thread.

    In optimizers that are initialized in the block.
    """
    sizes = dict.fromkeys(("_LEAST", "_MOST"), elements)
    sizes |= {"_CHUNK": elements // 2, "_THREAD": thread or elements}
    with mock.patch.multiple(node_update, **sizes):
        yield


def short_row_log(share: int) -> Any:
    """Remember as few changed rows as a table has, divided by ``share``."""
    return mock.patch.object(parameter_copies, "_SHARE", share)


@contextlib.contextmanager
def noted_copies() -> Iterator[list[str]]:
    """Yield a list of the names of gradients that pushes of this rank copy."""
    copied = list[str]()
    copy, quietly = wire_format._copy_gradients, wire_format.copy_quietly

    def noted(grads: Any, places: Any, flat: Any) -> None:
        names = {id(view): name for name, view in places.items()}

        def copy_one(place: Any, array: Any) -> None:
            copied.append(names[id(place)])
            quietly(place, array)

        with mock.patch.object(wire_format, "copy_quietly", copy_one):
            copy(grads, places, flat)

    with mock.patch.object(wire_format, "_copy_gradients", noted):
        yield copied


@contextlib.contextmanager
def noted_rows() -> Iterator[list[Any]]:
    """Yield a list of the number of rows of each copy of a table; "all" for all.

    Those of agents, between the two copies of a node, are not noted.
    """
    copied, copy = list[Any](), parameter_copies.copy_rows

    def noted(source: Any, target: Any, rows: Any) -> None:
        if not threading.current_thread().name.startswith("agent"):
            copied.append("all" if rows is None else rows.size)
        copy(source, target, rows)

    with mock.patch.object(parameter_copies, "copy_rows", noted):
        yield copied


def interrupt_pulls(name: str) -> Any:
    """Have pulls end with a KeyboardInterrupt, and spoil a variable, in a block."""
    read = parameter_copies.SparseCopier.read

    def interrupted(copier: Any, flat: Any, into: Any, *which: Any) -> None:
        read(copier, flat, into, *which)
        into[name][...] = 77
        raise KeyboardInterrupt

    return mock.patch.object(parameter_copies.SparseCopier, "read", interrupted)


def fail_when_accepted(optimizer: Any, error: type[BaseException]) -> Any:
    """Have gradients of this rank be accepted, and then raise, in the block."""
    inbox = optimizer._server._inbox
    submit = inbox.submit

    def failing(step: int) -> None:
        assert submit(step)
        raise error

    return mock.patch.object(inbox, "submit", failing)


@contextlib.contextmanager
def noted_row_messages() -> Iterator[list[int]]:
    """Yield a list of the bytes of each message with rows that this rank sends."""
    sizes, message = list[int](), row_draft.RowDraft.message

    def noted(draft: Any) -> Any:
        made = message(draft)
        sizes.append(made.size)
        return made

    with mock.patch.object(row_draft.RowDraft, "message", noted):
        yield sizes


# Nodes


def agent_of(group: Group) -> Any:
    """Return the agent of this rank's node, whose ``comm`` sends its messages."""
    return Agent.of(group)


def late_services(seconds: float) -> Any:
    """Have this rank go on late when its agent has a new object, in the block."""
    add = Agent.add

    def late(agent: Agent, service: Any) -> int:
        number = add(agent, service)
        time.sleep(seconds)
        return number

    return mock.patch.object(Agent, "add", late)


@contextlib.contextmanager
def hold_agent(group: Group, node: int) -> Iterator[Callable[[], None]]:
    """Have the agent of a node do nothing; yield what ends that. Collective."""
    begun, go = threading.Event(), threading.Event()

    class Held:
        def handle(self, source: int) -> Iterator[bool]:
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


def slow_parts(seconds: float, rank: int | None = None) -> Any:
    """Have servers pause before each piece of parameters they send, to one leader."""
    send = server_orders.send_pieces

    def slowly(comm: Any, to: int, *args: Any) -> Iterator[bool]:
        for done in send(comm, to, *args):
            end = time.monotonic() + seconds
            while rank in (None, to) and time.monotonic() < end:
                yield False
            yield done

    return mock.patch.object(server_orders, "send_pieces", slowly)


def piece_bytes(nbytes: int) -> Any:
    """Have agents send vectors in pieces of so many bytes, in the block."""
    return mock.patch.object(transfer, "_PIECE", nbytes)


def short_bytes(nbytes: int) -> Any:
    """Have ranks send vectors of up to so many bytes with their requests."""
    return mock.patch.object(transfer, "SHORT", nbytes)


def patience(seconds: float) -> Any:
    """Have ranks find out after so many seconds that another one is not coming."""
    return mock.patch.object(control, "_PATIENCE", seconds)
