"""The client of a parameter server: pushes gradients, pulls parameters."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from hpcaccum.accumulator import Receipt
from hpcaccum.deadline import Deadline
from hpcaccum.device import Transfer, all_on_device
from hpcaccum.dtypes import Array
from hpcaccum.errors import NO_MORE_DATA, InvalidArgumentError, format_ranks
from hpcaccum.mpi import Freeable
from hpcaccum.nodes import Narrowing, is_short
from hpcaccum.rows import Rows
from hpcaccum.server.double_buffer import step_of, version_of
from hpcaccum.server.loop import UpdateLock
from hpcaccum.server.node_update import ElementwiseRule, NodeUpdate
from hpcaccum.server.options import ServerSetup
from hpcaccum.server.orders import Orders
from hpcaccum.server.parameter_copies import Copier
from hpcaccum.server.part import Part, cut
from hpcaccum.server.publisher import Publisher
from hpcaccum.server.wire_format import WireFormat
from hpcaccum.spans import traced


class Client(Freeable):
    """One rank's connection to the center; the base of `ParameterServer`. Collective.

    Makes the memory through which gradients and parameters travel. A rank pushes and
    pulls from one thread at a time, but any thread may `read`.

    Attributes:
        is_root: Whether this rank decides what makes each update.
        is_server: Whether this rank holds the center, or a part of it.
        in_parts: Whether several servers hold parts of the center.
        waited: Seconds that this rank has waited in `push` and `pull`.
        rounds: Whether what is sent to other nodes is rounded.
        on_device: Whether the variables, and so their gradients, are on the device.
        inbox: Where gradients go.
    """

    def __init__(self, setup: ServerSetup, rule: ElementwiseRule | None) -> None:
        self._setup, self._group, self._what = setup, setup.group, setup.what
        self._servers = servers = setup.options.ranks
        self._root, self.in_parts = servers[0], len(servers) > 1
        self.is_root = setup.group.rank == self._root
        self.is_server = setup.group.rank in servers
        self.on_device = all_on_device(setup.what, setup.initial.values())
        wire = self._wire = WireFormat.of(setup.initial, setup.capacities)
        # A short vector, of gradients or parameters, is part of another message.
        shorter = min(wire.size, wire.parameters.size)
        nbytes, narrow = shorter * wire.gradients.dtype.itemsize, None
        if setup.options.wire_dtype is not None and not is_short(nbytes):
            narrow = np.dtype(setup.options.wire_dtype)
        self.rounds = narrow is not None
        with contextlib.ExitStack() as undo:
            of = wire.size, wire.gradients.dtype, wire.rows
            self.inbox = setup.make_inbox(setup.what, *of)
            undo.callback(self.inbox.free)
            if narrow is not None:
                dtype, end = wire.gradients.dtype, wire.present.start
                self.inbox.parts.narrowing = Narrowing(dtype, narrow, end)
            self._copier = Copier(wire, setup.group, self._root, narrow)
            undo.callback(self._copier.free)
            # A single server has all, also what is not an element of a variable.
            slices, parts = [slice(0, self._copier.size)], list[Part]()
            if self.in_parts:
                freely = setup.elementwise
                slices = cut(wire.parameters, len(servers), elementwise=freely)
                parts = [Part(wire, each, elementwise=freely) for each in slices]
            self._publisher = Publisher(
                setup.group, servers, slices, self._copier, setup.what
            )
            undo.callback(self._publisher.free)
            self._orders: Orders | None = None
            if parts:
                self._orders = Orders(setup, parts, self.inbox, self._publisher)
                undo.callback(self._orders.free)
            self._node_update = self._make_node_update(rule)
            undo.pop_all()
        # Held by the updates of this rank, if it makes any.
        self._update_lock = UpdateLock(setup.what)
        # This rank's buffer from the first request to the push, and all views of it
        # that `gradient_arrays` has returned.
        self._lent: Array | None = None
        self._views: list[Array] = []
        self._transfer: Transfer | None = None
        # The step of the last pull.
        self._pulled = 0
        # Which changes the array of each sparse variable has from its last pull. The
        # entry is missing during a pull, when the array may have some of the next ones.
        self._has: dict[str, int] = {}
        # What was assigned last is in this version, and in newer ones.
        self._assigned = 0
        # A step that comes to this node unasked: that of the last push.
        self._coming = -1
        # For this one the rank has not waited after its push.
        self._expected = -1
        self.waited = 0.0
        # What `free` still has to call.
        parts_made = self._node_update, self.inbox, self._orders
        made = *parts_made, self._publisher, self._copier
        self._to_free = [each.free for each in made if each is not None]

    def _make_node_update(self, rule: ElementwiseRule | None) -> NodeUpdate | None:
        """Return how ranks share the work of updates, None if they cannot."""
        layout = self._wire.parameters
        alike = all(dtype == layout.dtype for dtype in self._wire.dtypes.values())
        one_vector = alike and not self._wire.rows
        if rule is None or not self._group.single_node or not one_vector:
            return None
        parts, copies = self.inbox.parts, self._publisher.copies
        return NodeUpdate(self._group, self._root, rule, layout, parts, copies)

    def _describe(self) -> str:
        return self._what

    def place(self) -> str:
        """Return the step that this rank has pulled, for messages."""
        return f"step {self._pulled} of {self._what}"

    @property
    def step(self) -> int:
        """The step of the newest parameters; across nodes a round trip."""
        return self._publisher.newest()

    @property
    def recent_step(self) -> int:
        """The step as of a moment ago; a load if a newer one is hardly possible."""
        if self.inbox.needs_all:
            return self._publisher.version()
        return self._publisher.recent()

    @traced("pull", lambda _, step: {"step": step})
    def pull(
        self, into: Mapping[str, Array], *, at_least: int = 0, known: int = -1
    ) -> int:
        """Copy the newest parameters that this node has; return their step."""
        here = self._publisher.version()
        if here == known and here >= at_least:
            return known
        since: dict[str, int] = {}
        if self._has:
            mine = [name for name in self._has if name in into]
            since = {name: self._has.pop(name) for name in mine}
        if known != self._pulled:
            since = {}
        least = max(version_of(at_least), self._assigned)
        self._pulled, has = self._copy(into, least, since, self.on_device)
        self._has.update(has)
        return self._pulled

    def forget(self, names: Iterable[str]) -> None:
        """Copy all rows of some variables at their next pull."""
        for name in names:
            self._has.pop(name, None)

    def _copy(
        self,
        into: Mapping[str, Array],
        at_least: int,
        since: Mapping[str, int],
        on_device: bool = False,
    ) -> tuple[int, dict[str, int]]:
        """Copy the newest parameters; return their step and what `Copier.read` does."""
        deadline = Deadline(None, f"{self._what}: pull")
        copies = self._publisher.copies
        if copies.version() < at_least:
            self._wait_for(at_least, deadline)

        def copy(flat: Array) -> dict[str, int]:
            if not on_device:
                return self._copier.read(flat, into, since)
            self._fetch(flat, into)
            return {}

        version, has = copies.read(copy, deadline)
        return step_of(version), has

    def _wait_for(self, version: int, deadline: Deadline) -> None:
        # What is made already comes to this node also during a pause.
        paused, step = self._update_lock.is_read_by_this_thread(), step_of(version)
        if paused and step > self._publisher.newest():
            self.check_not_paused("a pull")
        try:
            self._publisher.wait_for(
                version,
                deadline,
                lambda: self._missing(step),
                None if self._node_update is None else self._node_update.help,
                comes=version == version_of(self._coming),
            )
        finally:
            self.waited += deadline.waited

    def expect(self, step: int) -> None:
        """Have the parameters of a step sent here; `leave` waits for them."""
        self._expected = step
        if step != self._coming:
            self._publisher.fetch(version_of(step))

    def _missing(self, step: int) -> str:
        """Describe what the next update waits for, by the words on the root."""
        made = self.step
        lacks, advice = self.inbox.awaited(made), ""
        if lacks is not None and self.inbox.adds:
            advice = f"; {NO_MORE_DATA}"
        elif lacks is None:
            lacks = f"rank {self._root}, which has all gradients that it needs"
        left = self.inbox.membership.left()
        gone = f"{format_ranks(left)} {'has' if len(left) == 1 else 'have'} left"
        return (
            f"update {step} by rank {self._root}, which is at step {made}; the next "
            f"one waits for {lacks}; {gone if left else 'no rank has left'}{advice}"
        )

    def check_not_paused(self, call: str) -> None:
        """Refuse a call that would wait for updates that this thread has paused."""
        if self._update_lock.is_read_by_this_thread():
            raise InvalidArgumentError(
                f"{self._what}: {call} waits for updates, which are paused; call it "
                f"after the block of paused()"
            )

    def read(self, names: Iterable[str]) -> list[Array]:
        """Return copies of the newest parameters of these names, all of one step."""
        shapes, dtypes = self._wire.parameters.shapes, self._wire.dtypes
        copies = {name: np.empty(shapes[name], dtypes[name]) for name in names}
        self._copy(copies, self._publisher.newest_version(), {})
        return [copies[name] for name in names]

    def gradient_arrays(self) -> dict[str, Array]:
        """Return memory for this rank's next gradients, by name, until `push`.

        Waits until the last gradients are applied. After the push the arrays are
        read-only.
        """
        arrays, _ = self._wire.gradient_views(self._buffer())
        self._views += arrays.values()
        return arrays

    def _buffer(self) -> Array:
        if self._lent is None:
            self.check_not_paused("a push")
            begun = time.monotonic()
            self._lent = self.inbox.buffer(self._pulled)
            self.waited += time.monotonic() - begun
        return self._lent

    def push(
        self,
        grads: Mapping[str, Array | Rows],
        local_step: int,
        weight: float = 1.0,
    ) -> Receipt:
        """Submit gradients, by name, with a weight. Variables may be missing.

        If they are accepted, their update makes step ``receipt.global_step + 1``.
        """
        self._wire.write_gradients(
            grads,
            self._buffer(),
            clear=self.inbox.adds,
            send=self._send if self.on_device else None,
        )
        # Before: a gradient that was admitted keeps its buffer, also if this raises.
        self._lent = None
        for view in self._views:
            # NumPy refuses writes from now on: they would corrupt a gradient.
            view.flags.writeable = False
        self._views.clear()
        receipt = self.inbox.submit(local_step, weight)
        if receipt.accepted and self.inbox.adds:
            self._coming = receipt.global_step + 1
        return receipt

    def drop(self, local_step: int) -> Receipt:
        """Count a gradient that is not finite; return its receipt."""
        self.inbox.counters.count_nonfinite(self._group.rank)
        return Receipt(False, local_step, self.step, nonfinite=True)

    # The device. A push and a pull have one buffer there: each of them waits until the
    # device is done, so they never overlap.

    def _device_buffer(self) -> Transfer:
        """Return what copies to and from the device, made at the first call."""
        if self._transfer is None:
            gradients = self._wire.gradients
            self._transfer = Transfer(gradients, gradients.dtype, gradients.dtype)
            self._transfer.pin(self.inbox.parts.own)
            self._transfer.pin(self._publisher.copies.memory)
        self._transfer.check_device()
        return self._transfer

    def _send(self, grads: Mapping[str, Any], buffer: Array) -> None:
        """Copy gradients from the device to a buffer; overwrites all of the buffer."""
        for event in self._device_buffer().send(grads, buffer):
            event.synchronize()

    def _fetch(self, flat: Array, into: Mapping[str, Any]) -> None:
        """Copy a vector of parameters to arrays on the device."""
        buffer = self._device_buffer()
        buffer.fetch(flat, slice(0, self._wire.parameters.size))
        buffer.deliver(into)
        buffer.settle()

    def _free(self) -> None:
        self._lent = None
        self._views.clear()
        if self._transfer is not None:
            self._transfer.free()
            self._transfer = None
        # One that fails does so on all ranks, and is the first of the next call.
        while self._to_free:
            self._to_free[0]()
            del self._to_free[0]
