"""The parameter server: on every rank a client, and the rank's role as a server."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from hpcaccum.accumulator import Tally
from hpcaccum.deadline import Deadline
from hpcaccum.device import to_host
from hpcaccum.dtypes import Array
from hpcaccum.errors import InvalidArgumentError, WaitTimeoutError, echo, format_ranks
from hpcaccum.mpi import MPI, lack_of_threads
from hpcaccum.server.client import Client
from hpcaccum.server.double_buffer import step_of, version_of
from hpcaccum.server.loop import Loop, OrderLoop, Update, UpdateLock, UpdateLoop
from hpcaccum.server.node_update import ElementwiseRule
from hpcaccum.server.options import ServerSetup
from hpcaccum.server.parameter_copies import Copier
from hpcaccum.server.part import Center
from hpcaccum.server.quorum import QuorumInbox

# For each variable, names to arrays or integers.
Arrays = Mapping[str, Mapping[str, Any]]


class ServerState(NamedTuple):
    """A server after a number of updates, without the slots of the optimizer."""

    step: int
    tally: Tally
    center: dict[str, Array]


class ParameterServer(Client):
    """Parameters on one rank, the center, updated by gradients of all. Collective.

    Step k is the parameters after k updates. Every rank is a client. A server also runs
    a `Loop`, in threads beside its own training or alone. After `free` the last
    parameters can still be read, with their step and the tally.

    The ``rule`` makes the updates of all variables if they are alike; it is equal on
    all ranks. `free` calls ``finish`` on every rank, after the last update, while pulls
    are still possible.

    Attributes:
        only_serves: Whether this rank serves and does not train.
    """

    # On servers: what updates the center, or a part of it. What orders these updates,
    # on the root of several servers; and that one or the other, which is run.
    _updates: UpdateLoop
    _ordering: OrderLoop
    _loop: Loop

    def __init__(
        self,
        setup: ServerSetup,
        rule: ElementwiseRule | None,
        finish: Callable[[], None],
    ) -> None:
        group, what, step = setup.group, setup.what, setup.step

        def check() -> dict[str, object]:
            _check_server(setup)
            return {"step": step, "tally": setup.tally}

        group.agree(what, check)
        self._final: ServerState | None = None
        # What `free` sends to the other ranks, and what it has received from all.
        self.note: tuple[str, ...] = ()
        self.notes: list[tuple[str, ...]] = []
        # Whether a dedicated server has nothing left to do; whether memory is freed.
        self._served = self._frees = False
        # Servers that this rank leaves when it ends one of them: others may wait there.
        self._with: list[ParameterServer] = []
        self._finish = finish
        super().__init__(setup, rule)
        self._dedicated = bool(setup.options.dedicated)
        self.only_serves = self._dedicated and self.is_server
        if self._dedicated:
            self.inbox.membership.exclude(self._servers)
        if self.is_root:
            self.inbox.set_global_step(step)
        if self.is_server:
            self._make_loops()
        self._register(group, group.label(what))
        # No rank pulls before the center is published, and has come to its node.
        first = Deadline(None, f"{what}: first parameters")
        self._wait_for(version_of(step), first)

    def _make_loops(self) -> None:
        """Make the loop of this rank's part of the center, and that of the root."""
        what, orders, step = self._what, self._orders, self._setup.step
        self._loop = loop = self._updates = UpdateLoop(
            orders or self.inbox,
            self._update_lock if orders is None else UpdateLock(what),
            what,
            self._make_center(),
            self._publisher,
            self._node_update,
        )
        loop.set_step(step)
        if orders is not None:
            orders.assign = loop.assign
            if self.is_root:
                self._loop = self._ordering = OrderLoop(
                    self.inbox, self._update_lock, what, orders, loop
                )
                self._ordering.set_step(step)

    def _make_center(self) -> Center:
        """Return what this server has, in memory of the node if its ranks can help."""
        if self._orders is not None:
            wire, first = self._orders.own.wire, self._orders.first
            return Center(wire, Copier(wire), self._publisher.own, first)
        initial = self._setup.initial
        arrays = {name: np.array(to_host(array)) for name, array in initial.items()}
        if self._node_update is not None:
            for name, array in self._node_update.center.items():
                np.copyto(array, arrays[name])
            arrays = self._node_update.center
        copies, threads = self._publisher.copies, self._group.own_cores
        return Center(self._wire, self._copier, copies, arrays, threads)

    @property
    def center(self) -> dict[str, Array]:
        """Name to array: what a server holds; after `free`, all, on every rank."""
        if self._final is not None:
            return self._final.center
        return self._updates.center.arrays if self.is_server else {}

    @property
    def slots(self) -> dict[str, dict[str, Array]] | None:
        """For each slot of the rule, name to array, on a server until `free`.

        None if the rule is not used, because variables are sparse or have several
        dtypes, or ranks several nodes.
        """
        if self._node_update is None or not self.is_server or self._final is not None:
            return None
        return self._node_update.slots

    @property
    def has_to_serve(self) -> bool:
        """Whether the others wait for `serve` of this rank."""
        return self.only_serves and not self._served

    def start(
        self,
        update: Update,
        rate: Callable[[], float | None],
        answer: Callable[[Any], Any],
    ) -> None:
        """Begin to serve, in threads unless servers are dedicated; servers only.

        For the arguments see `UpdateLoop`, `OrderLoop` and `Orders`.
        """
        self._updates.update = update
        if self._orders is not None:
            self._orders.answer = answer
        if self.in_parts and self.is_root:
            self._ordering.rate = rate
        if not self._dedicated:
            self._loop.start_thread()

    def serve(self, after_update: Callable[[int], object] | None = None) -> None:
        """Serve until all other ranks have left; a dedicated server only."""
        if self.only_serves:
            self._serve(after_update)
            return
        rank, servers = self._group.rank, format_ranks(self._servers)
        if self._dedicated:
            are = "are" if self.in_parts else "is"
            why = f"rank {rank} is not a server ({servers} {are}); it must train"
        else:
            how = (
                "serve while they train" if self.in_parts else "serves while it trains"
            )
            why = f"dedicated=True was not given: {servers} {how}; do not call serve()"
        raise InvalidArgumentError(f"{self._what}: {why}")

    def _serve(self, after_update: Callable[[int], object] | None = None) -> None:
        if self.is_root:
            self._loop.after_update = after_update
        self._loop.run()
        self._served = True

    def ask(self, question: Any) -> list[Any]:
        """Return the answers of several servers, all of one step; the root only.

        After `free`, those to None.
        """
        with self.paused():
            return self._ordering.ask(question)

    def divide(self, arrays: Arrays | None) -> Arrays | None:
        """Return what a server keeps of arrays of the root, else None. Collective."""
        if arrays is None:
            return None
        if self._orders is not None:
            return self._orders.divide(arrays)
        return arrays if self.is_root else None

    @property
    def source(self) -> int:
        """The rank whose values are assigned: the root, or the first that trains."""
        if not self._dedicated:
            return self._root
        ranks = range(self._group.size)
        return next(rank for rank in ranks if rank not in self._servers)

    def suspend(self) -> None:
        """End the loops of servers that only serve, until `assign`.

        Each rank that trains calls it. Gradients that were accepted are applied first.
        """
        members = self.inbox.membership
        if self._dedicated and not self.only_serves and not members.has_left:
            members.comes_back = True
            self.inbox.leave()

    @property
    def is_suspended(self) -> bool:
        """Whether ranks have suspended this server, which has ended its loop."""
        return self.inbox.membership.some_come_back()

    def assign(self, values: Mapping[str, Array]) -> int:
        """Set the center to values between two updates; return the step. Collective.

        The step, the slots, the tally and all gradients stay.
        """
        call, failure, version = f"{self._what}: assign", None, -1
        if self.is_server:
            if self._orders is not None:
                own = self._orders.own
                values = {name: own.piece(name, values[name]) for name in own.within}
            self._updates.kept = values
        # No server may get the order before it has the values.
        self._group.allgather(None, call)
        try:
            if self.is_root:
                with self.paused():
                    version = self._publisher.newest_version() + 1
                    self._loop.assign(version)
        except Exception as error:
            failure = error
        self.come_back()
        versions = self._group.raise_together(call, failure, version)
        self._assigned = versions[self._root]
        # The values of this rank are newer than any that it has pulled.
        self._has.clear()
        self._pulled = step_of(self._assigned)
        return self._pulled

    def come_back(self) -> None:
        """End what `suspend` has begun, before all ranks meet."""
        self.inbox.membership.come_back()
        if self.only_serves and self._served:
            self._loop.come_back()
            if self._orders is not None:
                self._orders.come_back()
            self._served = False

    @contextlib.contextmanager
    def paused(self) -> Iterator[int]:
        """Make no update while the body runs; give it the step. The root only."""
        if not self.is_root:
            raise InvalidArgumentError(
                f"{self._what}: only rank {self._root} makes updates and can pause "
                f"them, as snapshot() does; call it on rank {self._root}"
            )
        deadline = Deadline(None, f"{self._what}: paused")
        with self._update_lock.reading(deadline):
            if self._final is None and self.in_parts:
                self._ordering.wait_for_ordered(deadline)
            yield self.step

    def state(self) -> ServerState:
        """Return a copy of the state between two updates; the root only until `free`.

        The tally may count gradients that are accepted and not yet applied.
        """
        if self._final is not None:
            return self._read_state()
        with self.paused():
            return self._read_state()

    def _read_state(self) -> ServerState:
        names = list(self._wire.parameters)
        center = dict(zip(names, self.read(names), strict=True))
        return ServerState(self.step, self.tally(), center)

    # What can be asked after `free` too

    @property
    def step(self) -> int:
        """The number of updates that are published."""
        if self._final is not None:
            return self._final.step
        return super().step

    def read(self, names: Iterable[str]) -> list[Array]:
        """Return copies of the newest parameters of these names, all of one step."""
        if self._final is not None:
            return [self._final.center[name].copy() for name in names]
        return super().read(names)

    def tally(self) -> Tally:
        """Return the gradients accepted and dropped so far, of all ranks."""
        if self._final is not None:
            return self._final.tally
        tally, earlier = self.inbox.counters.tally(), self._setup.tally
        return tally if earlier is None else earlier + tally

    # The end

    def leave(self) -> None:
        """Promise that this rank pushes no more; no-op on a root that only serves."""
        if not self.only_serves:
            # A quorum shrinks when a rank leaves: first, its last gradient must count.
            if (step := self._expected) > self._publisher.version():
                self._wait_for(version_of(step), Deadline(None, f"{self._what}: leave"))
            self.inbox.leave()

    def leave_with(self, other: ParameterServer) -> None:
        """Leave two servers at the end of either; both train the same ranks."""
        self._with.append(other)
        other._with.append(self)

    def needs(self, rank: int) -> bool:
        """Whether a rank serves; or memory is being freed, for which MPI waits.

        Several servers need all nodes: a gradient of one that is lost may have come to
        some of them. Also if too few workers remain.
        """
        workers = {*range(self._group.size)} - self._group.lost.keys()
        if self._dedicated:
            workers.difference_update(self._servers)
        if len(workers) < self._setup.options.min_workers:
            return True
        leads = self.in_parts and any(rank == each[0] for each in self._group.nodes)
        return rank in self._servers or self._frees or leads

    def lose(self, rank: int) -> None:
        """Have updates no longer wait for a rank."""
        if self.is_root:
            self.inbox.membership.lose_rank(rank)

    def _free(self) -> None:
        self.check_not_paused("free()")
        # Not again if the rest of an earlier call has failed.
        if self._final is None:
            self._end(f"{self.label}: free")
        if self._group.lost:
            # Since this call began. All ranks know it that have met without a lost one.
            self._end_after_loss()
            return
        self._frees = True
        super()._free()

    def _end_after_loss(self) -> None:
        if self._final is None:
            self._end(f"{self.label}: free")
        # Until here others read what is on this rank.
        self._group.gather_present(None, f"{self.label}: free")

    def _end(self, call: str) -> None:
        """Leave, wait for all others to leave, end the role, keep the last values."""
        for server in self, *self._with:
            if server._final is None:
                server.leave()
        if self.has_to_serve:
            # `serve` was not called, or was interrupted: the others wait for updates.
            self._serve()
        notes = self._group.gather_present(self.note, call)
        self.notes = [notes.get(rank, ()) for rank in range(self._group.size)]
        self._end_updates(call)
        self._finish()
        # From now on nothing reads the shared memory.
        self._final = self._read_state()
        if self.is_server:
            del self._updates.center

    def _end_updates(self, call: str) -> None:
        """Wait for the last update, which all ranks pull; fail on all ranks or none."""
        failure, deadline = None, Deadline(None, call)
        try:
            if self.is_server:
                self._loop.end(deadline)
        except WaitTimeoutError as error:
            failure = error
        found = self._group.gather_present(failure and str(failure), call)
        if text := next(filter(None, found.values()), None):
            raise failure or echo(WaitTimeoutError(text))


def _check_server(setup: ServerSetup) -> None:
    """Check what a rank can check alone."""
    group, servers = setup.group, setup.options.ranks
    several = len(servers) > 1 and group.rank in servers
    # Between nodes agents check it, also for a root that is dedicated.
    beside = group.single_node and not setup.options.dedicated
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE and (several or beside):
        needs, instead = "each of several servers needs", []
        if beside:
            needs = "a server needs while the host trains"
            instead = ["use dedicated=True, so that the host only serves"]
        raise InvalidArgumentError(lack_of_threads(needs, *instead))
    check_first_step(setup.step, "step")


def check_first_step(step: int, name: str) -> None:
    """Raise InvalidArgumentError unless a server can begin with a step."""
    most = QuorumInbox.most_first_step
    if not 0 <= step <= most:
        raise InvalidArgumentError(f"{name} must be 0 to {most}, got {step}")
