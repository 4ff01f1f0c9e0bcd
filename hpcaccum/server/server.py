"""The parameter server: a client on every rank, the loop of updates on the root."""

from __future__ import annotations

import contextlib
import itertools
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hpcaccum.accumulator import Tally
from hpcaccum.deadline import Deadline
from hpcaccum.device import to_host
from hpcaccum.errors import InvalidArgumentError, WaitTimeoutError
from hpcaccum.mpi import MPI
from hpcaccum.server.client import Client
from hpcaccum.server.update_loop import UpdateLoop

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from hpcaccum.mpi import Group
    from hpcaccum.server.inbox import Inbox
    from hpcaccum.server.node_update import ElementwiseRule
    from hpcaccum.server.update_loop import Update

Array = np.ndarray[Any, Any]


class ServerState(NamedTuple):
    """A server after a number of updates, from which another one can continue.

    The slots of the optimizer that makes the updates are not part of it.

    Attributes:
        step: The number of updates.
        tally: The gradients accepted and dropped so far.
        center: Name to array.
    """

    step: int
    tally: Tally
    center: Mapping[str, Array]


class ParameterServer(Client):
    """Parameters on one rank, the center, updated by gradients of all. Collective.

    Step k is the parameters after k updates. Every rank is a client, and the root runs
    the updates: in a thread beside its own training, or alone. After `free` the last
    parameters can still be read, with their step and the tally.

    Args:
        group: The ranks.
        root: The rank that holds the center and runs the updates.
        initial: Name to array, the same names and shapes on all ranks; the center
            starts with the root's.
        inbox: Makes the inbox, given the size and the dtype of a flat gradient.
        dedicated: Whether the root only serves; it must then call `serve`.
        what: Name for messages.
        rule: Makes the updates of all variables if they are alike; equal on all ranks.
        finish: Called by `free` on every rank, after the last update, while pulls are
            still possible.
        step, tally: Where an earlier server ended (`ServerState`), to continue from it;
            the same on all ranks.

    Attributes:
        center: Name to array, on the root; empty on other ranks.
        slots: For each slot of the rule, name to array, likewise; None if the rule is
            not used, because variables have several dtypes or ranks several nodes.

    Raises:
        InvalidArgumentError: On every rank, if MPI provides no THREAD_MULTIPLE and the
            root is not dedicated or there are several nodes; or ``step`` is negative.
        DisagreementError: On every rank, if ``step`` or ``tally`` differ.
    """

    def __init__(
        self,
        group: Group,
        root: int,
        initial: Mapping[str, Array],
        inbox: Callable[[int, np.dtype[Any]], Inbox],
        *,
        dedicated: bool,
        what: str,
        rule: ElementwiseRule | None = None,
        finish: Callable[[], None] = lambda: None,
        step: int = 0,
        tally: Tally | None = None,
    ) -> None:
        one_node = group.single_node

        def check() -> dict[str, object]:
            # Between nodes agents check it, also for a root that is dedicated.
            if not dedicated and one_node:
                _check_threads()
            if step < 0:
                raise InvalidArgumentError(f"step must be at least 0, got {step}")
            return {"step": step, "tally": tally}

        group.agree(what, check)
        self._final: ServerState | None = None
        super().__init__(group, root, initial, inbox, rule, what)
        self._dedicated, self._finish, self._earlier = dedicated, finish, tally
        self._loop: UpdateLoop | None = None
        self.center: dict[str, Array] = {}
        self.slots: dict[str, dict[str, Array]] | None = None
        if self.is_root:
            self._make_center(initial)
            self._loop = self._make_loop()
            self._loop.set_step(step)
            group.progress.start()
        self._register(group, what)
        # No rank pulls before the center is published, and has come to all nodes.
        group.allgather(None, what)
        self._wait_for(step, Deadline(None, f"{what}: first parameters"))

    def _make_center(self, initial: Mapping[str, Array]) -> None:
        if self._together is None:
            self.center = {n: np.array(to_host(a)) for n, a in initial.items()}
            return
        self.center, self.slots = self._together.center, self._together.slots
        for name, array in initial.items():
            np.copyto(self.center[name], to_host(array))

    def _make_loop(self) -> UpdateLoop:
        return UpdateLoop(
            self.center,
            self._inbox,
            self._parameters,
            self._wire,
            self._together,
            self._update_lock,
            self._threads,
            self._what,
        )

    @property
    def is_root(self) -> bool:
        """Whether this rank holds the center."""
        return self._group.rank == self._root

    @property
    def only_serves(self) -> bool:
        """Whether this rank serves and does not train."""
        return self._dedicated and self.is_root

    def start(self, update: Update) -> None:
        """Begin to serve, in a thread unless the root is dedicated; the root only.

        Args:
            update: Gets the gradients by name, without those that no rank submitted;
                changes the arrays in `center`.
        """
        assert self._loop is not None
        self._loop.update = update
        if not self._dedicated:
            self._loop.start_thread()

    def serve(self) -> None:
        """Serve until all other ranks have left; a dedicated root only."""
        if self._loop is None or not self._dedicated:
            raise InvalidArgumentError(
                f"{self._what}: serve() is for the host of dedicated=True"
            )
        self._loop.run()

    @contextlib.contextmanager
    def paused(self) -> Iterator[int]:
        """Make no update while the body runs; give it the step. The root only.

        Raises:
            InvalidArgumentError: On other ranks.
            WaitTimeoutError: If the current update does not end in time.
        """
        if not self.is_root:
            raise InvalidArgumentError(
                f"{self._what}: updates are made by rank {self._root}, and can be "
                f"paused there only"
            )
        with self._update_lock.reading(Deadline(None, f"{self._what}: paused")):
            yield self.step

    def state(self) -> ServerState:
        """Return a copy of the state between two updates; the root only until `free`.

        The tally may count gradients that are accepted and not yet applied.

        Raises:
            InvalidArgumentError, WaitTimeoutError: See `paused`.
        """
        if self._final is None:
            with self.paused() as step:
                return ServerState(step, self.tally(), _copies(self.center))
        return self._final._replace(center=_copies(self._final.center))

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
        tally = self._inbox.tally()
        return tally if self._earlier is None else _sum(self._earlier, tally)

    # The end

    def leave(self) -> None:
        """Promise that this rank pushes no more; no-op on a root that only serves."""
        if not self.only_serves:
            self._inbox.leave()

    def _free(self) -> None:
        """Leave, wait for all others to leave, stop the loop, free the memory."""
        self._check_not_paused("free()")
        call = f"{self.label}: free"
        self.leave()
        self._group.allgather(None, call)
        self._end_updates(call)
        self._finish()
        names = list(self._wire.parameters)
        center = dict(zip(names, self.read(names), strict=True))
        # From now on nothing reads the shared memory.
        self._final = ServerState(self.step, self.tally(), center)
        self.center, self.slots = center, None
        if self._loop is not None:
            self._loop.center = center
            self._group.progress.stop()
        super()._free()

    def _end_updates(self, call: str) -> None:
        """Wait for the last update, which all ranks pull; fail on all ranks or none."""
        failure = None
        if self._loop is not None:
            try:
                self._loop.join(Deadline(None, call))
            except WaitTimeoutError as error:
                failure = error
        self._group.raise_together(call, failure)


def _check_threads() -> None:
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise InvalidArgumentError(
            "MPI provides no MPI_THREAD_MULTIPLE, which a server beside the host's "
            "own training needs; give it a rank of its own: dedicated=True"
        )


def _copies(arrays: Mapping[str, Array]) -> dict[str, Array]:
    return {name: array.copy() for name, array in arrays.items()}


def _sum(one: Tally, other: Tally) -> Tally:
    """Return the counts of two runs together; their numbers of ranks may differ."""

    def added(these: tuple[int, ...], those: tuple[int, ...]) -> tuple[int, ...]:
        pairs = itertools.zip_longest(these, those, fillvalue=0)
        return tuple(left + right for left, right in pairs)

    lags = {
        lag: one.lags.get(lag, 0) + other.lags.get(lag, 0)
        for lag in sorted(one.lags.keys() | other.lags.keys())
    }
    return Tally(
        added(one.accepted, other.accepted),
        added(one.dropped, other.dropped),
        lags,
        added(one.given_up, other.given_up),
    )
