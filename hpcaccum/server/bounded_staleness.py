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

    from hpcaccum.dtypes import Array
    from hpcaccum.mpi import Group
    from hpcaccum.nodes import Call
    from hpcaccum.server.update_queue import Factors


class BoundedStalenessInbox(UpdateQueue):
    """Admits gradients up to a lag; passes on each as one update. Collective.

    The queue has the order of the gradients. Each of them stays in a buffer on the node
    of its rank until the root takes it.

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
        workers = group.size if workers is None else workers
        super().__init__(group, root, max_lag, workers, what, factors)
        self._group, self._count, self._dtype = group, size, np.dtype(dtype)
        self._what, submit = what, f"{what}: submit"
        with contextlib.ExitStack() as undo:
            undo.callback(self.words.free)
            nbytes = size * self._dtype.itemsize
            self.parts = NodeParts(group, nbytes, what, takers=[root])
            undo.pop_all()
        # A view of mapped memory: a rank may use its buffer after `free`.
        self._mine = Place(group.rank, 0)
        self._buffer = self.parts.view(self._mine, size, self._dtype)
        self._pinned: Pinned | None = None
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

    def buffer(self, known: int = 0) -> Array:
        """Return the memory for this rank's next gradient; always the same.

        Waits until the last one is applied, which a rank may not have waited for. If
        this rank has the parameters of that step, ``known``, it asks nobody.
        """
        self._settle()
        Deadline(None, f"{self._what}: slot").wait(
            lambda: known >= self._submitted or self.applied >= self._submitted or None,
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

    @traced("admission", lambda _, receipt: receipt.shown())
    def _submit(self, local_step: int) -> Receipt:
        if self._remote is not None:
            # The answer may lead other ranks to what is in the buffer.
            self.words.sync()
            contents = self.parts.short(self._mine, self._count, self._dtype)
            self._unanswered = self._remote.begin(local_step, contents)
            return self._answer()
        return self._note(self._admit(self._rank, local_step))

    def _admit(
        self, rank: int, local_step: int, contents: bytes | None = None
    ) -> Receipt:
        """Submit the gradient of this rank, or of one that waits for the answer."""
        receipt, whose = self.admit(rank, local_step), rank
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
            self.put(receipt, whose)
        self.end_intent(rank)
        return receipt

    def _answer(self) -> Receipt:
        """Wait for the answer of the agent; it may be to a call that has ended."""
        assert self._unanswered is not None
        receipt: Receipt = self._unanswered.result()
        self._unanswered = None
        return self._note(receipt)

    def _note(self, receipt: Receipt) -> Receipt:
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
        """Wait for the gradient that makes step ``step + 1``; the root only.

        Raises:
            EverybodyLeftError: If all ranks have left and no gradient is left.
        """
        yield self._batch(self._wait_for(step, deadline), step)
        self.note_applied(step + 1)

    @traced("take", lambda args, _: {"step": args[1]})
    def _wait_for(self, step: int, deadline: Deadline) -> Found:

        def find() -> Found | None:
            return self.find_final(step)

        def missing() -> str:
            return f"update {step + 1}, {self.source(step)}"

        if self._calls is None:
            return deadline.wait(find, missing)
        there = self.may_find(step)
        return self._calls.wait(find, there, deadline, missing, soon=True)

    def following(self, step: int) -> Batch | None:
        """Return the gradient admitted at ``step``; None if it has not arrived."""
        found = self.find(step)
        return None if found is None else self._batch(found, step)

    def _batch(self, found: Found, step: int) -> Batch:
        whose, factor = found
        rank = whose & NOBODY
        copied = [rank] if whose & COPIED else []
        is_lost = rank == NOBODY or (not copied and self.parts.is_lost(rank))
        places = [] if is_lost else [Place(rank, 0)]
        return Batch(self.parts, places, self._dtype, 1, step, copied, factor)

    def leave(self) -> None:
        """Promise that this rank submits no more gradients."""
        self._settle()
        self.membership.leave()

    def free(self) -> None:
        """Free the memory. Collective."""
        if self._pinned is not None:
            self._pinned.free()
        self._buffer = np.empty(0, self._dtype)
        if self._calls is not None:
            self._calls.free()
        self.parts.free()
        self.words.free()
