"""The admission protocol: which round a gradient joins, and when a round closes.

No lock is held while a gradient is copied. One 64-bit word, STATE, decides by
compare-and-swap which gradient is admitted to which round; the payload is copied
afterwards. Each rank has one record per round, a word that only it writes: how many of
its gradients have arrived. Rounds alternate between two parities: while one is being
reduced, the other is open. A take clears the records of a parity before it passes its
turn on, hence before that parity can be opened again.

A take that finds too few gradients does not poll the count. It replaces the count in
STATE by the number still missing. The writer that decrements it to zero closes the
round in the same compare-and-swap, so no gradient can be admitted between the last one
required and the close. TensorFlow's queue behaves in the same way.

A rank may be lost at any point: an exception ends its call. Before a rank tries to have
a gradient admitted, it sets a word, its intent, to the parity that it tries. It clears
the word when its record says that the gradient has arrived. As soon as no rank but lost
ones has an open intent for a closed round, what was admitted and has not arrived is
lost, and the take leaves it out.

A take first writes to CLOSED what it is about to close. If it fails, the next take
finds there what is left to do: a round that was closed and not reduced is reduced then.

`AdmissionProtocol` has the words and what writers do with them; `taker` has what takes
do. The protocol is model-checked: tests/model/accumulator.pml.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hpcaccum.accumulator.membership import Membership
from hpcaccum.accumulator.receipts import Counters, Receipt
from hpcaccum.accumulator.row_shapes import RowShapes
from hpcaccum.accumulator.shapes import (
    FixedShape,
    ShapePerRound,
    ShapePolicy,
    ShapeTable,
)
from hpcaccum.accumulator.state import Packing, Record, State, admits
from hpcaccum.accumulator.ticket_lock import TicketLock
from hpcaccum.accumulator.word_layout import WordLayout
from hpcaccum.errors import InvalidArgumentError, format_ranks
from hpcaccum.mpi import AtomicWords
from hpcaccum.spans import traced

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpcaccum.accumulator.settings import Settings
    from hpcaccum.mpi import Group

# The receipt of a gradient, the parity of its round, the number of the round's shape.
Admitted = tuple[Receipt, int, int]

# Writes to STATE must not invalidate the cache line of other words.
_FIXED = WordLayout()
STATE = _FIXED.take(own_lines=True)
# How many gradients the waiting take requires, with a tag; see `announce`.
WANT = _FIXED.take()
# The STATE that the take which has its turn closes, whether or not it has closed it.
# If `waiting`, the round is reduced. 0 if there is none.
CLOSED = _FIXED.take()
# Gradients that were admitted and lost, in all rounds so far.
_NUM_LOST = _FIXED.take()
# The words of `Membership`. The first one follows the others: one read covers them.
MEMBERS = _FIXED.count
# Rounds that a rank may have missed since its last gradient.
_MOST_ROUNDS = 1000
# The intents of two ranks are on different cache lines.
_APART = 8


class AdmissionProtocol:
    """The words of one accumulator on its root, and the admission of gradients.

    Collective.

    Args:
        group: The ranks.
        settings: Of the accumulator.
        what: Name for messages.

    Attributes:
        words: All words.
        shapes: The shape policy.
        membership: Which ranks contribute.
        take_lock: Held by the take that has its turn, first come, first served.
        counters: What happened to the gradients of each rank.
    """

    def __init__(self, group: Group, settings: Settings, what: str) -> None:
        rank, n = group.rank, group.size
        self._what, self._rank, self._size = what, rank, n
        self.packing = Packing(shaped=not settings.has_one_shape)
        layout = WordLayout(after=_FIXED)
        members = layout.take(Membership.words(n))
        lock = layout.take(TicketLock.words(n))
        self._records = layout.take(2 * n)
        self._intents = layout.take(_APART * n, own_lines=True)
        counters = layout.take(Counters.words(n))
        limit = self.packing.max_shapes
        table = layout.take(ShapeTable.words(limit))
        self.words = words = AtomicWords(group, settings.host, layout.count)
        self.membership = Membership(words, members, rank, n, settings.workers)
        self.take_lock = TicketLock(words, lock, rank, n, self.membership.lost, what)
        self.counters = Counters(words, counters, rank, n)
        self.shapes = _policy(settings, what, ShapeTable(words, table, limit))
        # Where reading STATE costs a round trip, the first guess is made from the last
        # state seen, and from the one that admitted this rank's last gradient.
        self._seen = self._joined = self.packing.unpack(0)
        # This rank's intent: 0, or 1 and the parity of a round.
        self._intent = 0

    def state(self) -> State:
        """Return the state now."""
        return self.packing.unpack(self.words.read(STATE))

    def swap(self, old: State, new: State) -> bool:
        """Replace the state if it is ``old``; return whether it was."""
        word = self.packing.pack(old)
        return self.words.compare_and_swap(STATE, word, self.packing.pack(new)) == word

    def changed(self, parity: int, changes: int) -> Callable[[], bool]:
        """Return what finds out whether another round is open, or ranks have left."""
        state, members = self.words.watch(STATE), self.words.watch(MEMBERS)
        unpack = self.packing.unpack
        return lambda: unpack(state()).parity != parity or members() != changes

    def set_step(self, step: int) -> int:
        """Set the step; return what it was before."""
        limit = self.packing.max_first_step
        if abs(step) > limit:
            raise InvalidArgumentError(
                f"{self._what}: step must be within +-{limit}, got {step}"
            )
        while True:
            state = self.state()
            if self.swap(state, state._replace(step=step)):
                return state.step

    def free(self) -> None:
        """Free the words. Collective."""
        self.words.free()

    # Admission

    @traced("admission", lambda _, admitted: admitted[0].shown() if admitted else {})
    def admit(
        self, grad: Any, local_step: int, only: int | None = None
    ) -> Admitted | None:
        """Admit a gradient to the open round, or find it stale.

        `end_intent` comes when the gradient has arrived, or if it was not admitted.

        Args:
            grad: The gradient, which only the shape policy reads.
            local_step: The step at which the gradient was computed.
            only: Parity to which the gradient may be admitted, if not to both.

        Returns:
            None if the parity that is open is not ``only``.

        Raises:
            InvalidArgumentError: If the shape does not fit, or the round is full.
        """
        fresh = self.words.direct
        state = self.state() if fresh else self._guess(local_step)
        while True:
            shape = self._shape_if_admissible(grad, local_step, state)
            if shape is not None and only in (None, state.parity):
                self._intend(state.parity)
                word, after = self.packing.pack(state), state.admitted(shape)
                found = self.words.compare_and_swap(
                    STATE, word, self.packing.pack(after)
                )
                if found == word:
                    self._joined, self._seen = state, after
                    return Receipt(True, local_step, state.step), state.parity, shape
                state, fresh = self.packing.unpack(found), True
            elif fresh:
                self._seen = state
                return self._refuse(grad, local_step, state)
            else:
                # Reject only on a fresh read of STATE, never on a guess.
                state, fresh = self.state(), True

    def _guess(self, local_step: int) -> State:
        """Return what STATE probably is when a rank has a gradient of a step.

        Ranks often come in the same order as in the round before.
        """
        seen, last = self._seen, self._joined
        rounds = local_step - seen.step
        # A step far ahead is one that is to be accepted in any case.
        if 0 < rounds <= _MOST_ROUNDS:
            parity = (seen.parity + rounds) & 1
            return last._replace(step=local_step, parity=parity)
        if last.step == seen.step or last.waiting != seen.waiting:
            return seen
        later = min if seen.waiting else max
        return seen._replace(number=later(seen.number, last.number))

    def _shape_if_admissible(
        self, grad: Any, local_step: int, state: State
    ) -> int | None:
        """Return the number of the gradient's shape; None if it is not admitted."""
        if not admits(state.step, local_step) or self.is_full(state):
            return None
        return self.shapes.number(grad, state.shape)

    def is_full(self, state: State) -> bool:
        """Return whether the open round has no room for one more gradient."""
        return state.number >= self.packing.max_count and not state.waiting

    def _refuse(self, grad: Any, local_step: int, state: State) -> Admitted | None:
        """Return or raise the reason why a gradient is not admitted to ``state``."""
        if not admits(state.step, local_step):
            return Receipt(False, local_step, state.step), state.parity, 0
        if self.shapes.number(grad, state.shape) is None:
            raise self.shapes.misfit(grad, state.shape)
        if self.is_full(state):
            raise InvalidArgumentError(
                f"{self._what}: a round holds at most {self.packing.max_count} "
                f"gradients; take them first"
            )
        return None

    def is_stale(self, local_step: int, *, ask: bool) -> bool:
        """Return whether a gradient is stale, by the last word seen.

        Args:
            local_step: The step at which the gradient was computed.
            ask: Read STATE first, also where that costs a round trip.
        """
        if ask or self.words.direct:
            self._seen = self.state()
        return not admits(self._seen.step, local_step)

    # Intents

    def _intend(self, parity: int) -> None:
        """Publish that this rank tries to join the round of a parity."""
        if self._intent != 1 + parity:
            index = self._intents + _APART * self._rank
            self.words.store_unordered(index, 1 + parity, self._intent)
            self._intent = 1 + parity

    def end_intent(self) -> None:
        """Publish that nothing of this rank is on its way to a round."""
        if self._intent:
            index = self._intents + _APART * self._rank
            self.words.store_unordered(index, 0, self._intent)
            self._intent = 0

    def intend_for(self, rank: int, parity: int) -> None:
        """Publish the intent of another rank; for an agent."""
        self.words.store_unordered(self._intents + _APART * rank, 1 + parity, 0)

    def end_intent_for(self, rank: int, parity: int) -> None:
        """Publish the end of an intent of another rank; for an agent."""
        self.words.store_unordered(self._intents + _APART * rank, 0, 1 + parity)

    def note_intent(self, parity: int) -> None:
        """Note the intent that an agent has published for this rank."""
        self._intent = 1 + parity

    def open_intents(self, parity: int) -> list[int]:
        """Return the ranks that are not lost and may join the round of a parity."""
        words = self.words.read_range(self._intents, _APART * self._size)[::_APART]
        ranks = [rank for rank, word in enumerate(words) if word == 1 + parity]
        if ranks:
            lost = self.membership.lost()
            ranks = [rank for rank in ranks if rank not in lost]
        return ranks

    # Records

    def record_index(self, parity: int, rank: int) -> int:
        """Return the index of a rank's record of the round of a parity."""
        return self._records + parity * self._size + rank

    def holds_gradient(self, parity: int) -> bool:
        """Return whether this rank has a record of the round of this parity."""
        return self.words.read(self.record_index(parity, self._rank)) != 0

    def mark_adding(self, parity: int, record: Record) -> None:
        """Publish that this rank adds to a sum; before its first store there."""
        self.words.store(self.record_index(parity, self._rank), [record.word()])

    def put_record(self, parity: int, record: Record, before: Record | None) -> None:
        """Publish what this rank has in the round; its payload is in place.

        Before, it had ``before``.
        """
        index = self.record_index(parity, self._rank)
        self.words.write(index, record.word(), before.word() if before else 0)

    def read_records(self, parity: int) -> dict[int, Record]:
        """Return the records of the ranks that have one."""
        words = self.words.read_range(self.record_index(parity, 0), self._size)
        return {rank: Record.of(word) for rank, word in enumerate(words) if word}

    def clear_records(self, parity: int) -> None:
        """Clear the records of all ranks."""
        self.words.write_range(self.record_index(parity, 0), [0] * self._size)

    # The take that has the turn, as other ranks see it

    def announce(self, wanted: int) -> None:
        """Publish how many gradients the take requires before it waits for them."""
        # Each request has its own tag: if WANT is the same before and after a read of
        # STATE, the two belong together.
        bits = self.packing.max_count.bit_length()
        tag = (self.words.read(WANT) >> bits) + 1
        self.words.write(WANT, tag << bits | wanted)

    def put_closing(self, closing: State, *, reduced: bool = False) -> None:
        """Record what the take closes; once ``reduced``, no other take does that."""
        word = self.packing.pack(closing._replace(waiting=int(reduced)))
        self.words.store_unordered(CLOSED, word, 0)

    def end_closing(self) -> None:
        """Record that the take is complete."""
        self.words.write(CLOSED, 0)

    def closing(self) -> State | None:
        """Return what the last take recorded; None if it is complete."""
        word = self.words.read(CLOSED)
        return self.packing.unpack(word) if word else None

    def add_lost(self, number: int) -> None:
        """Count gradients that are lost; for the take that has its turn."""
        if number:
            self.words.write(_NUM_LOST, self.words.read(_NUM_LOST) + number)

    def num_lost(self) -> int:
        """Return how many gradients were admitted and lost."""
        return self.words.read(_NUM_LOST)

    def count(self) -> int:
        """Return how many gradients no take has returned yet.

        These are the gradients of the open round, and those of a round that a take
        closed and could not finish.
        """
        bits = self.packing.max_count.bit_length()
        while True:
            want = self.words.read(WANT)
            closing = self.closing()
            state = self.state()
            resumable = 0
            if closing and closing.parity != state.parity and not closing.waiting:
                resumable = closing.number
            if not state.waiting:
                return resumable + state.number
            if self.words.read(WANT) == want:
                return resumable + (want & (1 << bits) - 1) - state.number

    def awaited(self, required: int, step: int) -> str | None:
        """Return what the round of a step lacks, None if nothing; on any rank."""
        state = self.state()
        if state.step <= step:
            members = self.membership
            num_left = members.num_left(members.changes())
            return self.missing(members.quorum(required, num_left))
        writing = self.open_intents(1 - state.parity)
        return self.unfinished(1 - state.parity) if writing else None

    def missing(self, wanted: int) -> str:
        """Return which ranks have no gradient in the open round, for messages."""
        state = self.state()
        records = self.read_records(state.parity)
        had = self.count()
        silent = self.membership.present() - set(records)
        who = f"nothing from {format_ranks(silent)}"
        if not silent:
            who = "every rank has sent at least one"
        return f"{wanted} gradients at step {state.step}, had {had} ({who})"

    def unfinished(self, parity: int) -> str:
        """Return which ranks were admitted and have not written, for messages."""
        slow = self.open_intents(parity)
        return f"{format_ranks(slow)}, admitted to the round, to finish writing"


def _policy(settings: Settings, what: str, table: ShapeTable) -> ShapePolicy:
    """Return the shape policy; ``table`` is for shapes that differ between rounds."""
    if settings.has_one_shape:
        return FixedShape(settings, what)
    policy = RowShapes if settings.is_sparse else ShapePerRound
    return policy(settings, what, table)
