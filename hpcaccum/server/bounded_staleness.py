"""The inbox of asynchronous updates: each gradient is one update.

Admission advances the step, so gradients are applied in the order of their admission.
The lag of a gradient counts all that were admitted before it, also those that are not
applied yet. The check and the update are therefore one atomic operation.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from hpcaccum.accumulator import (
    Batch,
    Counters,
    Membership,
    Receipt,
    WordLayout,
    admits,
)
from hpcaccum.deadline import Deadline
from hpcaccum.dtypes import Array
from hpcaccum.errors import EverybodyLeftError, format_ranks
from hpcaccum.mpi import Group, bits, number_of
from hpcaccum.nodes import Call, Calls, NodeParts, Place, words_of
from hpcaccum.server.lateness import Factors
from hpcaccum.spans import traced

# On a cache line of its own: swaps of _STEP must not slow down reads of other words.
_FIXED = WordLayout()
_STEP = _FIXED.take(own_lines=True)
_APPLIED = _FIXED.take()
# One place per rank, followed by the words of `Membership`.
_HEAD = _FIXED.count
# A place has the step that an update makes, and whose gradient it is: its rank, and
# _COPIED if the agent of the root's node has a copy. It is 0 before the first gradient.
# _NOBODY stands for the rank of a gradient that is lost.
_NOBODY = (1 << 20) - 1
_COPIED, _WHOSE_BITS = _NOBODY + 1, 21
# Whose gradient it is, and its factor.
Found = tuple[int, float]
# The intents of two ranks are on different cache lines.
_APART = 8


class BoundedStalenessInbox:
    """Admits gradients up to a lag; passes on each as one update. Collective.

    Words are a queue of the gradients. Each of them stays in a buffer on the node of
    its rank until the root takes it.

    A rank submits, then waits until its gradient is applied (`buffer`); only then may
    it write to its buffer again, and submit the next one. The root takes one gradient
    after the other. So no more are admitted and not applied than there are ranks: they
    have consecutive steps, and each has a place of its own in the queue, that of its
    step. A second word of the place has the factor of the gradient.

    Before a rank tries to have a gradient admitted, it sets a word, its intent, to the
    least step at which it may be, and clears it when the gradient is in its place. A
    step that was made, whose place is empty and for which no rank that is present has
    an open intent, is that of a rank that is lost. A rank is lost if an exception ends
    `submit`; the update of a gradient that was admitted and is not in its place then
    changes nothing.

    Between nodes, the agent of the root's node admits a gradient, puts it in its place
    and counts it: a rank sends one message and waits for the answer.
    """

    adds = needs_all = False

    def __init__(
        self,
        group: Group,
        root: int,
        size: int,
        dtype: Any,
        *,
        max_lag: float,
        workers: int,
        factors: Factors | None,
        what: str,
    ) -> None:
        self._rank, self._size, self._max_lag = group.rank, group.size, max_lag
        self._group, self._factors = group, factors
        # On the root, by step: gradients that are not applied. Once the rank of one has
        # the parameters, another one may get its place.
        self._found: dict[int, Found] = {}
        layout = WordLayout(_FIXED.count)
        layout.take(group.size)
        # The first of these words follows the places, so that one read returns both.
        self._members = layout.take(Membership.words(group.size))
        counters = layout.take(Counters.words(group.size))
        # The factor of each place, as bits.
        self._scales = layout.take(group.size)
        self._intents = layout.take(_APART * group.size, own_lines=True)
        self._words = words_of(group, root, layout.count, what)
        self.membership = Membership(
            self._words, self._members, group.rank, group.size, workers
        )
        self.counters = Counters(self._words, counters, group.size)
        self._dtype, self._what = np.dtype(dtype), what
        with contextlib.ExitStack() as undo:
            undo.callback(self._words.free)
            nbytes = size * self._dtype.itemsize
            self.parts = NodeParts(group, nbytes, what, takers=[root])
            undo.pop_all()
        # A view of mapped memory: a rank may use its buffer after `free`.
        self._buffer = self.parts.view(Place(group.rank, 0), size, self._dtype)
        # The step that the update of this rank's last gradient makes.
        self._submitted = 0
        # A call of an agent that has not answered.
        self._unanswered: Call | None = None
        # Last, as other ranks may call at once; and those of this rank, if the root is
        # on another node.
        self._calls: Calls | None = None
        if not group.single_node:
            self._calls = Calls(group, root, self._admit, f"{what}: submit")
        self._remote = None if self._words.direct else self._calls

    @property
    def global_step(self) -> int:
        """The number of gradients admitted so far, plus the first step."""
        return self._words.read(_STEP)

    def set_global_step(self, step: int, /) -> None:
        """Set the step of the first update; the root only, before any admission."""
        self.note_applied(step)
        self._words.write(_STEP, step)

    def note_applied(self, step: int) -> None:
        """Say that the gradients that make steps up to this one are applied."""
        self._words.write(_APPLIED, step)
        self._found.pop(step - 1, None)

    # A rank

    def buffer(self, known: int = 0) -> Array:
        """Return the memory for this rank's next gradient, after its last update."""
        self._settle()
        step, root = self._submitted, self._words.root
        # Without a question if this rank has pulled that update: it has step ``known``.
        Deadline(None, f"{self._what}: slot").wait(
            lambda: known >= step or self._words.read(_APPLIED) >= step or None,
            lambda: f"update {step}, this rank's last, by rank {root}",
        )
        return self._buffer

    def submit(self, local_step: int, weight: float = 1.0) -> Receipt:
        """Submit the gradient in the buffer, unless it is stale."""
        self.membership.check_present()
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
            self._words.sync()
            is_sent = self.parts.is_sent(self._buffer.nbytes)
            contents = self._buffer.tobytes() if is_sent else None
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
                whose |= _COPIED
        # Before it is in the queue: a gradient that was applied is in the counts.
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
        """Return the least step whose parameters are worth computing with at a step."""
        # With a negative one, none are accepted.
        lag = max(self._max_lag, 0)
        return 0 if math.isinf(lag) else step - int(lag)

    def awaited(self, step: int) -> str | None:
        """Return which ranks a step waits for; None if its gradient has arrived."""
        words = self._words.read_range(_STEP, self._members)
        made = [(word >> _WHOSE_BITS, word & _NOBODY) for word in words[_HEAD:]]
        if words[_APPLIED] > step or any(each == step + 1 for each, _ in made):
            return None
        if words[_STEP] <= step:
            return f"a gradient, {self._source(step)}"
        # A rank with a gradient of a later step has none of this one.
        later = {rank for each, rank in made if each > step}
        return (
            f"one of {format_ranks(self.membership.present() - later)}, whose gradient "
            f"was admitted, to write it"
        )

    def _source(self, step: int) -> str:
        """Return where the gradient of a step is, which has not arrived."""
        if self.global_step > step:
            return "admitted, to be written"
        return f"which may come from {format_ranks(self.membership.present())}"

    # Admission

    def admit(self, rank: int, local_step: int) -> Receipt:
        """Admit a gradient of a rank, unless it is stale. `end_intent` comes later."""
        step, factor = self.global_step, 1.0
        if accepted := self._max_lag == math.inf:
            self._set_intent(rank, 1 + step)
            step = self._words.fetch_add(_STEP, 1)
        while not accepted and admits(step, local_step, self._max_lag):
            self._set_intent(rank, 1 + step)
            found = self._words.compare_and_swap(_STEP, step, step + 1)
            accepted, step = found == step, found
        if accepted and self._factors is not None:
            factor = self._factors(step - local_step)
        return Receipt(accepted, local_step, step, factor=factor)

    def _set_intent(self, rank: int, word: int) -> None:
        self._words.store_unordered(self._intents + _APART * rank, word)

    def end_intent(self, rank: int) -> None:
        """Say that the last gradient of a rank is in its place, or not admitted."""
        self._set_intent(rank, 0)

    def put(self, receipt: Receipt, whose: int) -> None:
        """Say whose gradient was admitted, with a receipt."""
        step = receipt.global_step
        if self._factors is not None:
            scale = self._scales + step % self._size
            self._words.write(scale, bits(receipt.factor))
        self._words.write(self._place(step), (step + 1) << _WHOSE_BITS | whose)

    def _place(self, step: int) -> int:
        return _HEAD + step % self._size

    # The root

    @contextlib.contextmanager
    def next(self, step: int, deadline: Deadline) -> Iterator[Batch]:
        """Wait for the gradient that makes step ``step + 1``; the root only."""
        yield self._batch(self._wait_for(step, deadline), step)
        self.note_applied(step + 1)

    @traced("take", lambda args, _: {"step": args[1]})
    def _wait_for(self, step: int, deadline: Deadline) -> Found:
        def find() -> Found | None:
            return self._find_final(step)

        def missing() -> str:
            return f"update {step + 1}, {self._source(step)}"

        if self._calls is None:
            return deadline.wait(find, missing)
        there = self._may_find(step)
        return self._calls.wait(find, there, deadline, missing)

    def following(self, step: int) -> Batch | None:
        """Return the gradient admitted at ``step``; None if it has not arrived."""
        found = self._find(step)
        return None if found is None else self._batch(found, step)

    def _find(self, step: int) -> Found | None:
        """Return what was put in the place for a step; None: nothing yet."""
        if step not in self._found:
            word = self._words.read(self._place(step))
            if word >> _WHOSE_BITS != step + 1:
                return None
            factor = 1.0
            if self._factors is not None:
                factor = number_of(self._words.read(self._scales + step % self._size))
            self._found[step] = word & ((1 << _WHOSE_BITS) - 1), factor
        return self._found[step]

    def _find_final(self, step: int) -> Found | None:
        """Return as `_find`, or that it is lost; raise EverybodyLeftError."""
        if (found := self._find(step)) is not None:
            return found
        if self._is_lost(step):
            # It may have come since, which is final then.
            return self._find(step) or (_NOBODY, 1.0)
        # A rank that has left has submitted all of its gradients before.
        everybody = self.membership.all_left(self._words.read(self._members))
        if everybody and self.global_step == step:
            raise EverybodyLeftError(f"all {self.membership.workers} ranks have left")
        return None

    def _is_lost(self, step: int) -> bool:
        """Whether a gradient, whose place was empty, was admitted and cannot come."""
        if self.global_step <= step or not (lost := self.membership.lost()):
            return False
        words = self._words.read_range(self._intents, _APART * self._size)[::_APART]
        return all(
            not 0 < word <= 1 + step or rank in lost for rank, word in enumerate(words)
        )

    def _may_find(self, step: int) -> Callable[[], bool]:
        """Return what finds out whether `_find_final` may return or raise."""
        words = self._place(step), self._members, _STEP
        place, changes, newest = map(self._words.watch, words)
        all_left, lost = self.membership.all_left, self.membership.lost
        return lambda: (
            place() >> _WHOSE_BITS == step + 1
            or (all_left(changes()) and newest() == step)
            or (changes() > 0 and newest() > step and bool(lost()))
        )

    def _batch(self, found: Found, step: int) -> Batch:
        whose, factor = found
        rank = whose & _NOBODY
        copied = [rank] if whose & _COPIED else []
        is_lost = rank == _NOBODY or (not copied and self.parts.is_lost(rank))
        places = [] if is_lost else [Place(rank, 0)]
        return Batch(self.parts, places, self._dtype, 1, step, copied, factor)

    # The end

    def leave(self) -> None:
        """Promise that this rank submits no more gradients."""
        self._settle()
        self.membership.leave()

    def free(self) -> None:
        """Free the memory. Collective."""
        self._buffer = np.empty(0, self._dtype)
        if self._calls is not None:
            self._calls.free()
        self.parts.free()
        self._words.free()
