"""ParameterServer: the loop take -> optimizer -> publish, and its clients.

One object on every rank. The host runs the loop, in a thread beside its own training
or alone; the others, and the host's own training, push gradients and pull parameters.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hpcaccum.deadline import Deadline
from hpcaccum.device import all_on_device, copyto, to_host
from hpcaccum.errors import EverybodyLeftError, InvalidArgumentError, format_ranks
from hpcaccum.layout import Layout
from hpcaccum.mpi import MPI, Opened, report_and_abort
from hpcaccum.overlap import overlap, same_elements
from hpcaccum.server.device import DeviceLink
from hpcaccum.server.double_buffer import DoubleBuffer
from hpcaccum.server.update_lock import UpdateLock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from hpcaccum.accumulator import Receipt, Tally
    from hpcaccum.mpi import Group
    from hpcaccum.server.inbox import Inbox

Array = np.ndarray[Any, Any]

# Which variables have a gradient travels with the gradients, as one number each.
_PRESENT = "?present"


class Final(NamedTuple):
    """What a server can still be asked after it was freed.

    Attributes:
        step: How many updates there were.
        tally: What was accepted and dropped.
        center: Name to array.
    """

    step: int
    tally: Tally
    center: Mapping[str, Array]


class ParameterServer:
    """The center's parameters on one rank, updated by gradients of all. Collective.

    Step k is the parameters after k updates. After `free` the last ones can still be
    read, with their step and the tally.

    Args:
        group: The ranks.
        host: The rank that holds the center, and runs the updates.
        initial: Name to array, the same names and shapes on all ranks; the center
            begins with the host's.
        inbox: Makes the inbox; gets the size and the dtype of a flat gradient.
        dedicated: Whether the host only serves; it must then call `serve`.
        what: Name for messages.
        finish: Called by `free` on every rank, after the last update, while it can
            still be pulled.

    Raises:
        InvalidArgumentError: On every rank, if MPI gives no THREAD_MULTIPLE and the
            host is not dedicated.
    """

    def __init__(
        self,
        group: Group,
        host: int,
        initial: Mapping[str, Array],
        inbox: Callable[[int, np.dtype[Any]], Inbox],
        *,
        dedicated: bool,
        what: str,
        finish: Callable[[], None] = lambda: None,
    ) -> None:
        self._group, self._host, self._what = group, host, what
        self._finish = finish
        self._dedicated, self.waited = dedicated, 0.0
        group.agree(what, self._check_threads)
        self._layout = Layout.of(initial)
        self._dtypes = {name: array.dtype for name, array in initial.items()}
        shapes = {**self._layout.shapes, _PRESENT: (len(initial),)}
        self._pushed = Layout(shapes, self._layout.dtype)
        with contextlib.ExitStack() as undo:
            self._inbox = inbox(self._pushed.size, self._pushed.dtype)
            undo.callback(self._inbox.free)
            size, dtype = self._layout.size, self._layout.dtype
            self._parameters = DoubleBuffer(group, host, size, dtype)
            undo.pop_all()
        self._device_link = DeviceLink(
            self._layout, self._pushed, self._inbox, self._parameters
        )
        # This rank's slot, from when it is asked for to the push.
        self._lent: Array | None = None
        # What `gradient_arrays` gave of it.
        self._views: list[Array] = []
        self.center: dict[str, Array] = {}
        if self.is_host:
            self.center = {n: np.array(to_host(a)) for n, a in initial.items()}
            self._parameters.start(self._fill)
            group.progress.start()
        self._update: Callable[[dict[str, Array]], None] | None = None
        self._update_lock = UpdateLock()
        self._final: Final | None = None
        self._thread: threading.Thread | None = None
        self._opened = Opened(group, self._free, what)
        # Nobody pulls before the center is there.
        group.allgather(None, what)

    @property
    def is_host(self) -> bool:
        """Whether this rank holds the center."""
        return self._group.rank == self._host

    @property
    def only_serves(self) -> bool:
        """Whether this rank does nothing but serve."""
        return self._dedicated and self.is_host

    def _check_threads(self) -> dict[str, object]:
        if not self._dedicated and MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            raise InvalidArgumentError(
                "MPI gives no MPI_THREAD_MULTIPLE, which a server beside the host's "
                "own training needs; give it a rank of its own: dedicated=True"
            )
        return {}

    # The host

    def start(self, update: Callable[[dict[str, Array]], None]) -> None:
        """Begin to serve, in a thread unless this host is dedicated; the host only.

        Args:
            update: Gets the gradients by name, without those that nobody brought;
                changes the arrays in `center`.
        """
        self._update = update
        if not self._dedicated:
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()

    def serve(self) -> None:
        """Serve until all other ranks have left; a dedicated host only."""
        if not self.only_serves:
            raise InvalidArgumentError(
                f"{self._what}: serve() is for the host of dedicated=True"
            )
        self._loop()

    def _run(self) -> None:
        try:
            self._loop()
        except BaseException:
            # Nobody would ever be answered again.
            report_and_abort(*sys.exc_info())

    def _loop(self) -> None:
        assert self._update is not None
        try:
            for step in itertools.count(self.step):
                # Whoever waits for an update has a limit; a server that idles has none.
                deadline = Deadline(math.inf, f"{self._what}: update {step + 1}")
                with self._inbox.next(step, deadline) as flat, self._update_lock:
                    # None, if a rank was admitted and then failed to write.
                    if grads := self._received(flat):
                        self._update(grads)
                    self._parameters.publish(self._fill)
        except EverybodyLeftError:
            return

    def _received(self, flat: Array) -> dict[str, Array]:
        """Return the gradients that somebody brought.

        The mean was formed over all gradients; a variable that some ranks had no
        gradient for gets the mean of the others.
        """
        views = self._pushed.views(flat)
        present = views.pop(_PRESENT)
        for name, share in zip(list(views), present, strict=True):
            if share == 0:
                del views[name]
            elif share != 1:
                views[name] /= share
        return views

    def _fill(self, flat: Array) -> None:
        # The one copy of an update; that of a reader is the other.
        for name, view in self._layout.views(flat).items():
            view[...] = self.center[name]

    @contextlib.contextmanager
    def paused(self) -> Iterator[int]:
        """Make no update while the body runs; give it the step. The host only.

        Raises:
            InvalidArgumentError: On other ranks.
            WaitTimeoutError: If the update that is being made does not end in time.
        """
        if not self.is_host:
            raise InvalidArgumentError(
                f"{self._what}: updates are made by rank {self._host}, and can be "
                f"paused there only"
            )
        with self._update_lock.reading(Deadline(None, f"{self._what}: paused")):
            yield self.step

    def _check_not_paused(self, call: str) -> None:
        """Refuse a call that would wait for an update that this thread holds up."""
        if self._update_lock.is_read_by_this_thread():
            raise InvalidArgumentError(
                f"{self._what}: {call} waits for updates, which are paused; call it "
                f"after the block of paused()"
            )

    # Every rank

    @property
    def step(self) -> int:
        """How many updates are published."""
        if self._final is not None:
            return self._final.step
        return self._parameters.version()

    def pull(
        self, into: Mapping[str, Array], *, at_least: int = 0, known: int = -1
    ) -> int:
        """Copy the newest parameters; return their step.

        They are copied once, from where the host wrote them, if the ranks share a node.

        Args:
            into: Name to array; only these are copied.
            at_least: Wait for this step.
            known: The step that ``into`` is at; nothing is copied if it is the newest.
        """
        newest = self.step
        if newest == known and newest >= at_least:
            return known
        deadline = Deadline(None, f"{self._what}: pull")
        if newest < at_least:
            self._wait_for(at_least, deadline)

        def copy(flat: Array) -> None:
            views = self._layout.views(flat)
            for name, array in into.items():
                copyto(array, views[name])

        to_device = all_on_device(self._what, into.values())
        bring = self._device_link.pull(into) if to_device else copy
        return self._parameters.read(bring, deadline)

    def _wait_for(self, step: int, deadline: Deadline) -> None:
        self._check_not_paused("a pull")
        begun = time.monotonic()
        try:
            deadline.wait(
                lambda: self.step >= step or None, lambda: self._missing(step)
            )
        finally:
            self.waited += time.monotonic() - begun

    def _missing(self, step: int) -> str:
        """Say what the next update waits for, as the words on the host have it."""
        made = self.step
        lacks = self._inbox.awaited(made)
        if lacks is None:
            lacks = f"rank {self._host}, which has all gradients that it needs"
        left = self._inbox.left()
        gone = f"{format_ranks(left)} {'has' if len(left) == 1 else 'have'} left"
        return (
            f"update {step} by rank {self._host}, is at {made}; the next one waits for "
            f"{lacks}; {gone if left else 'no rank has left'}"
        )

    def gradient_arrays(self) -> dict[str, Array]:
        """Return memory for this rank's next gradients, by name, until `push`.

        Waits if the last one is not applied yet. After the push the arrays are
        read-only.
        """
        arrays = self._pushed.views(self._slot())
        del arrays[_PRESENT]
        self._views += arrays.values()
        return arrays

    def _slot(self) -> Array:
        if self._lent is None:
            self._check_not_paused("a push")
            begun = time.monotonic()
            self._lent = self._inbox.slot()
            self.waited += time.monotonic() - begun
        return self._lent

    def push(self, grads: Mapping[str, Array], local_step: int) -> Receipt:
        """Send gradients by name; those that are missing count as not there.

        One that lies in its place of `gradient_arrays` is not copied. They may all be
        on a device.
        """
        slot = self._slot()
        views = self._pushed.views(slot)
        present = views.pop(_PRESENT)
        if all_on_device(self._what, grads.values()):
            self._device_link.push(grads, slot)
        else:
            _bring(grads, views, slot)
        present[:] = [name in grads for name in views]
        if self._inbox.adds:
            for name in views.keys() - grads.keys():
                views[name][...] = 0
        receipt = self._inbox.submit(local_step)
        self._lent = None
        for view in self._views:
            # A write there would now spoil a gradient: NumPy refuses it.
            view.flags.writeable = False
        self._views.clear()
        return receipt

    def missed(self, receipt: Receipt) -> int:
        """Return the least step at which a dropped gradient would have been in time."""
        return self._inbox.missed(receipt)

    def read(self, names: Iterable[str]) -> list[Array]:
        """Return copies of some of the center's newest arrays, all of one step."""
        if self._final is not None:
            return [self._final.center[name].copy() for name in names]
        shapes, dtypes = self._layout.shapes, self._dtypes
        copies = {name: np.empty(shapes[name], dtypes[name]) for name in names}
        self.pull(copies)
        return [copies[name] for name in names]

    def tally(self) -> Tally:
        """Return what was accepted and dropped so far, of all ranks."""
        return self._inbox.tally() if self._final is None else self._final.tally

    @property
    def window_bytes(self) -> int:
        """Memory of this rank that holds gradients and parameters for others."""
        return self._inbox.window_bytes + self._parameters.window_bytes

    def leave(self) -> None:
        """Promise that this rank pushes no more. A host that only serves need not."""
        if not self.only_serves:
            self._inbox.leave()

    def free(self) -> None:
        """Leave, wait for all others to leave, stop the loop, free. Collective."""
        self._check_not_paused("free()")
        self._opened.close()

    def _free(self) -> None:
        self.leave()
        self._group.allgather(None, f"{self._opened.label}: free")
        if self._thread is not None:
            self._thread.join()
        # The host's last update is published before anybody pulls it.
        self._group.allgather(None, f"{self._opened.label}: free")
        self._finish()
        names = list(self._layout)
        center = self.center or dict(zip(names, self.read(names), strict=True))
        # From now on nothing looks at the windows.
        self._final = Final(self.step, self.tally(), center)
        if self.is_host:
            self._group.progress.stop()
        self._lent = None
        self._views.clear()
        self._device_link.free()
        self._inbox.free()
        self._parameters.free()


def _bring(
    grads: Mapping[str, Array], places: Mapping[str, Array], slot: Array
) -> None:
    """Copy arrays to the places of their names in a slot, unless they lie there."""
    away = {
        name: array
        for name, array in grads.items()
        if not same_elements(array, places[name])
    }
    for name, array in away.items():
        # One that lies in another's place might be written over before it is read.
        if overlap(array, slot):
            away[name] = array.copy()
    for name, array in away.items():
        np.copyto(places[name], array, casting="same_kind")


def gradients_by_name(
    pairs: Sequence[tuple[Any, Any]],
) -> dict[str, Array]:
    """Return the gradients that are not None, by the name of their variable."""
    return {var.name: grad for grad, var in pairs if grad is not None}
