"""The inbox of asynchronous updates: each gradient is one update.

Admission advances the step, so gradients are applied in the order of their admission.
The lag of a gradient counts all that were admitted before it, also those that are not
applied yet. The check and the update are therefore one atomic operation.
"""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcaccum.accumulator import Batch, Receipt
from hpcaccum.deadline import Deadline
from hpcaccum.device import Pinned
from hpcaccum.nodes import Calls, NodeParts, Place
from hpcaccum.server.update_queue import COPIED, NOBODY, Found, UpdateQueue
from hpcaccum.spans import traced

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hpcaccum.accumulator import Membership, Tally
    from hpcaccum.dtypes import Array
    from hpcaccum.mpi import Group
    from hpcaccum.nodes import Call
    from hpcaccum.server.update_queue import Factors


class BoundedStalenessInbox:
    """Admits gradients up to a lag; passes on each as one update. Collective.

    An `UpdateQueue` has the order of the gradients. Each of them stays in a buffer on
    the node of its rank until the root takes it.

    A rank submits, then waits until its gradient is applied (`buffer`); only then may
    it write to its buffer again, and submit the next one. The root takes one gradient
    after the other. So no more are admitted and not applied than there are ranks.

    Between nodes, the agent of the root's node admits a gradient, puts it in its place
    and counts it: a rank sends one message and waits for the answer.

    If an exception ends `submit`, its rank has left. A gradient that was admitted and
    is not in its place then is lost: its update changes nothing.

    Args:
        group, what: The ranks; what messages begin with.
        root: The rank that applies the gradients.
        size, dtype: Of a gradient, a flat vector.
        max_lag: Largest lag that is admitted, in steps; infinity admits all gradients.
        workers: Number of ranks that submit, and may leave; all by default. If not
            all, the root does not submit.
        factors: Of gradients by their lag, the same on all ranks; all 1 by default.
    """

    adds = needs_all = False

    def __init__(
        self,
        group: Group,
        root: int,
        size: int,
        dtype: Any,
        *,
        max_lag: float = math.inf,
        workers: int | None = None,
        factors: Factors | None = None,
        what: str = "gradients",
    ) -> None:
        self._group, self._size, self._dtype = group, size, np.dtype(dtype)
        self._what, submit = what, f"{what}: submit"
        self._max_lag = max_lag
        with contextlib.ExitStack() as undo:
            workers = group.size if workers is None else workers
            self._queue = UpdateQueue(group, root, max_lag, workers, what, factors)
            undo.callback(self._queue.words.free)
            nbytes = size * self._dtype.itemsize
            self.parts = NodeParts(group, nbytes, what, takers=[root])
            undo.pop_all()
        self.words, self.counters = self._queue.words, self._queue.counters
        # A view of mapped memory: a rank may use its buffer after `free`.
        self._buffer = self._view(group.rank)
        self._pinned: Pinned | None = None
        # On the root, by step: gradients that are not applied. Once the rank of one has
        # the parameters, another one may get its place.
        self._found: dict[int, Found] = {}
        # The step that the update of this rank's last gradient makes.
        self._submitted = 0
        # A call of an agent that has not answered.
        self._unanswered: Call | None = None
        # Last, as other ranks may call at once; and those of this rank, if the root is
        # on another node.
        self._calls: Calls | None = None
        if not group.single_node:
            self._calls = Calls(group, root, self._admit, submit)
        self._remote = None if self.words.direct else self._calls

    def _view(self, rank: int) -> Array:
        return self.parts.view(Place(rank, 0), self._size, self._dtype)

    def _contents(self) -> bytes | None:
        """Return the contents of this rank's buffer if they may be sent at once."""
        place = Place(self._group.rank, 0)
        return self.parts.short(place, self._size, self._dtype)

    @property
    def membership(self) -> Membership:
        """Which ranks have left."""
        return self._queue.membership

    @property
    def window_bytes(self) -> int:
        """Memory of this rank that holds gradients."""
        return self.parts.nbytes_here

    def start(self, step: int) -> None:
        """Set the step of the first update; the root only, before any submission."""
        self._queue.start(step)

    def buffer(self, known: int = 0) -> Array:
        """Return the memory for this rank's next gradient; always the same.

        Waits until the last one is applied, which a rank may not have waited for. If
        ``known`` says so, it asks nobody; see `Inbox.buffer`.
        """
        self._settle()
        Deadline(None, f"{self._what}: slot").wait(
            lambda: (
                known >= self._submitted
                or self._queue.applied >= self._submitted
                or None
            ),
            lambda: (
                f"update {self._submitted}, this rank's last, by rank {self.words.root}"
            ),
        )
        return self._buffer

    def pin(self) -> None:
        """Pin this rank's buffer for DMA."""
        if self._pinned is None:
            self._pinned = Pinned(self._buffer)

    def submit(self, local_step: int, weight: float = 1.0) -> Receipt:
        """Submit the gradient in the buffer, unless it is stale.

        If it is accepted, its update makes step ``receipt.global_step + 1``.
        """
        self.check_present()
        self._settle()
        try:
            return self._submit(local_step)
        except BaseException as error:
            if self._unanswered is None:
                self.membership.lose(error)
            raise

    def count_nonfinite(self) -> None:
        """Count a gradient of this rank that is not finite, and was not submitted."""
        self.counters.count_nonfinite(self._group.rank)

    @traced("admission", lambda _, receipt: receipt.shown())
    def _submit(self, local_step: int) -> Receipt:
        if self._remote is not None:
            # The answer may lead other ranks to what is in the buffer.
            self.words.sync()
            self._unanswered = self._remote.begin(local_step, self._contents())
            return self._answer()
        receipt = self._admit(self._group.rank, local_step)
        if receipt:
            self._submitted = receipt.global_step + 1
        return receipt

    def _admit(
        self, rank: int, local_step: int, contents: bytes | None = None
    ) -> Receipt:
        """Submit the gradient of this rank, or of one that waits for the answer."""
        receipt, whose = self._queue.admit(rank, local_step), rank
        if receipt:
            # The place may be that of a later gradient.
            self.membership.check_counts(rank)
            if contents is not None:
                self.parts.keep(Place(rank, 0), contents)
                whose |= COPIED
        # First: a gradient that was applied is in the counts.
        self.counters.count(rank, receipt.accepted, receipt.lag)
        if receipt:
            # The store of the word orders it after all stores to the buffer.
            self._queue.put(receipt, whose)
        self._queue.end_intent(rank)
        return receipt

    def _answer(self) -> Receipt:
        """Wait for the answer of the agent; it may be to a call that has ended."""
        assert self._unanswered is not None
        receipt: Receipt = self._unanswered.result()
        self._unanswered = None
        if receipt:
            self._submitted = receipt.global_step + 1
        return receipt

    def _settle(self) -> None:
        """Wait for the answer to a gradient whose call has ended before."""
        if self._unanswered is not None:
            self._answer()

    def useful(self, step: int) -> int:
        """Return the least step whose parameters are worth computing with at a step.

        With a negative ``max_lag`` none are accepted, and ``step`` is returned.
        """
        lag = max(self._max_lag, 0)
        return 0 if math.isinf(lag) else step - int(lag)

    @contextlib.contextmanager
    def next(self, step: int, deadline: Deadline) -> Iterator[Batch]:
        """Wait for the gradient admitted at ``step``; the root only."""
        yield self._batch(self._wait_for(step, deadline), step)
        self._queue.note_applied(step + 1)
        self._found.pop(step, None)

    @traced("take", lambda args, _: {"step": args[1]})
    def _wait_for(self, step: int, deadline: Deadline) -> Found:
        """Wait for the gradient admitted at a step."""

        def find() -> Found | None:
            return self._find(step)

        def missing() -> str:
            return f"update {step + 1}, {self._queue.source(step)}"

        if self._calls is None:
            return deadline.wait(find, missing)
        there = self._queue.may_find(step)
        return self._calls.wait(find, there, deadline, missing, soon=True)

    def following(self, step: int) -> Batch | None:
        """Return the gradient admitted at ``step``; None if it has not arrived."""
        found = self._look(step)
        return None if found is None else self._batch(found, step)

    def _batch(self, found: Found, step: int) -> Batch:
        whose, factor = found
        rank = whose & NOBODY
        copied = [rank] if whose & COPIED else []
        is_lost = rank == NOBODY or (not copied and self.parts.is_lost(rank))
        places = [] if is_lost else [Place(rank, 0)]
        return Batch(self.parts, places, self._dtype, 1, step, copied, factor)

    def _look(self, step: int) -> Found | None:
        """Return what was admitted, also when another one has the place."""
        if step not in self._found:
            if (found := self._queue.find(step)) is None:
                return None
            self._found[step] = found
        return self._found[step]

    def _find(self, step: int) -> Found | None:
        """Return what was admitted at a step; None: nothing yet."""
        found = self._look(step)
        if found is None and self._queue.is_lost(step):
            # It may have come since, which is final then.
            return self._look(step) or (NOBODY, 1.0)
        if found is None:
            self._queue.check_comes(step)
        return found

    def awaited(self, step: int) -> str | None:
        """Return which ranks a step waits for; None if its gradient has arrived."""
        return self._queue.awaited(step)

    def tally(self) -> Tally:
        """Return the gradients accepted and dropped so far, of all ranks."""
        return self.counters.tally()

    def leave(self) -> None:
        """Promise that this rank submits no more gradients."""
        self._settle()
        self.membership.leave()

    def check_present(self) -> None:
        """Raise InvalidArgumentError if this rank has left."""
        self.membership.check_present("submit")

    def free(self) -> None:
        """Free the memory. Collective."""
        if self._pinned is not None:
            self._pinned.free()
        self._buffer = np.empty(0, self._dtype)
        if self._calls is not None:
            self._calls.free()
        self.parts.free()
        self.words.free()
