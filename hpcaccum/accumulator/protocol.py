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

An exception may occur at any point: a timeout, a MemoryError, a signal handler that
raises. A gradient that was admitted and cannot be written is subtracted from the count
while its round is open. After that, its rank's record marks it as given up, and the
take leaves it out. A take that fails withdraws its request. If its round is closed by
then, the round is recorded in CLOSED, and the next take resumes it.

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
from hpcaccum.accumulator.state import Packing, Record, State
from hpcaccum.accumulator.ticket_lock import TicketLock
from hpcaccum.accumulator.word_layout import WordLayout
from hpcaccum.errors import InvalidArgumentError, format_ranks
from hpcaccum.mpi import AtomicWords, Attempt

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
# The STATE of a closed round whose take failed; 0 if there is none.
CLOSED = _FIXED.take()
# The words of `Membership`. The first one follows the others: one read covers them.
MEMBERS = _FIXED.count
# Rounds that a rank may have missed since its last gradient.
_MOST_ROUNDS = 1000


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
        admission: The compare-and-swap that admits this rank's gradient.
    """

    def __init__(self, group: Group, settings: Settings, what: str) -> None:
        rank, n = group.rank, group.size
        self._what, self._rank, self._size = what, rank, n
        self.packing = Packing(shaped=not settings.has_one_shape)
        layout = WordLayout(after=_FIXED)
        members = layout.take(Membership.words(n))
        lock = layout.take(TicketLock.words(n))
        self._records = layout.take(2 * n)
        counters = layout.take(Counters.words(n))
        limit = self.packing.max_shapes
        table = layout.take(ShapeTable.words(limit))
        self.words = words = AtomicWords(group, settings.host, layout.count)
        self.membership = Membership(words, members, rank, n, settings.workers)
        self.take_lock = TicketLock(words, lock, rank, n)
        self.counters = Counters(words, counters, rank, n)
        self.shapes = _policy(settings, what, ShapeTable(words, table, limit))
        # Where reading STATE costs a round trip, the first guess is made from the last
        # state seen, and from the one that admitted this rank's last gradient.
        self._seen = self._joined = self.packing.unpack(0)
        # After an exception in `admit`, these hold the outcome.
        self.admission, self._shape = Attempt(), 0

    def state(self) -> State:
        """Return the state now."""
        return self.packing.unpack(self.words.read(STATE))

    def swap(self, old: State, new: State, attempt: Attempt | None = None) -> bool:
        """Replace the state if it is ``old``; return whether it was."""
        word = self.packing.pack(old)
        return (
            self.words.compare_and_swap(STATE, word, self.packing.pack(new), attempt)
            == word
        )

    def changed(self, parity: int, num_left: int) -> Callable[[], bool]:
        """Return what finds out whether another round is open, or ranks have left."""
        state, left = self.words.watch(STATE), self.words.watch(MEMBERS)
        unpack = self.packing.unpack
        return lambda: unpack(state()).parity != parity or left() != num_left

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

    def admit(
        self, grad: Any, local_step: int, only: int | None = None
    ) -> Admitted | None:
        """Admit a gradient to the open round, or find it stale.

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
                self._shape = shape
                word, after = self.packing.pack(state), state.admitted(shape)
                found = self.words.compare_and_swap(
                    STATE, word, self.packing.pack(after), self.admission
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
        if local_step < state.step or self.is_full(state):
            return None
        return self.shapes.number(grad, state.shape)

    def is_full(self, state: State) -> bool:
        """Return whether the open round has no room for one more gradient."""
        return state.number >= self.packing.max_count and not state.waiting

    def _refuse(self, grad: Any, local_step: int, state: State) -> Admitted | None:
        """Return or raise the reason why a gradient is not admitted to ``state``."""
        if local_step < state.step:
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
        return local_step < self._seen.step

    def admitted(self, local_step: int) -> Admitted | None:
        """Return what `admit` returned, or was about to return, if it admitted.

        For a caller that did not get the result because of an exception. The caller
        calls `forget_admission` before each gradient.
        """
        self.words.settle()
        if not self.admission.swapped:
            return None
        state = self.packing.unpack(int(self.admission.compare[0]))
        return Receipt(True, local_step, state.step), state.parity, self._shape

    def forget_admission(self) -> None:
        """Forget the outcome of the last `admit`, before the next one."""
        self.admission.reset()

    def withdraw(self, parity: int, record: Record | None, attempt: Attempt) -> bool:
        """Revoke the admission of this rank's last gradient.

        Args:
            parity: Of the round. It cannot have been opened again, because the round is
                not complete without the gradient.
            record: This rank's record of the round without that gradient.
            attempt: Holds the outcome after an exception.

        Returns:
            False if the round is closed already.
        """
        while True:
            state = self.state()
            if state.parity != parity:
                return False
            # First: after the swap the round may be taken without this rank.
            self.put_record(parity, record)
            if self.swap(state, state.withdrawn(), attempt):
                return True

    # Records

    def record_index(self, parity: int, rank: int) -> int:
        """Return the index of a rank's record of the round of a parity."""
        return self._records + parity * self._size + rank

    def holds_gradient(self, parity: int) -> bool:
        """Return whether this rank has a record of the round of this parity."""
        return self.words.read(self.record_index(parity, self._rank)) != 0

    def is_writing(self, parity: int) -> bool:
        """Return whether this rank's record says that it is still writing."""
        word = self.words.read(self.record_index(parity, self._rank))
        return bool(Record.of(word).writing)

    def mark_writing(self, parity: int, record: Record, before: Record | None) -> None:
        """Publish that this rank was admitted and begins to write.

        Before, it had ``before`` in the round.
        """
        index = self.record_index(parity, self._rank)
        self.words.store_unordered(index, record.word(), before.word() if before else 0)

    def put_record(
        self, parity: int, record: Record | None, writing: Record | None = None
    ) -> None:
        """Publish what this rank has in the round; its payload is in place.

        ``writing`` is what it published last, if that is known.
        """
        index = self.record_index(parity, self._rank)
        was = writing.word() if writing else None
        self.words.write(index, record.word() if record else 0, was)

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

    def put_closed(self, closing: State | None) -> None:
        """Record a closed round that the next take must resume; None: there is none."""
        self.words.write(CLOSED, self.packing.pack(closing) if closing else 0)

    def closed(self) -> State | None:
        """Return the closed round that the next take must resume, if there is one."""
        word = self.words.read(CLOSED)
        return self.packing.unpack(word) if word else None

    def count(self) -> int:
        """Return how many gradients no take has returned yet.

        These are the gradients of the open round, and those of a round that a take
        closed and could not finish.
        """
        bits = self.packing.max_count.bit_length()
        while True:
            want = self.words.read(WANT)
            resumable = self._count_closed()
            state = self.state()
            if not state.waiting:
                return resumable + state.number
            if self.words.read(WANT) == want:
                return resumable + (want & (1 << bits) - 1) - state.number

    def _count_closed(self) -> int:
        closed = self.closed()
        if not closed:
            return 0
        records = self.read_records(closed.parity).values()
        return closed.number - sum(record.given_up for record in records)

    def awaited(self, required: int, step: int) -> str | None:
        """Return what the round of a step lacks, None if nothing; on any rank."""
        state = self.state()
        if state.step <= step:
            members = self.membership
            return self.missing(members.quorum(required, members.num_left()))
        records = self.read_records(1 - state.parity).values()
        writing = any(record.writing for record in records)
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
        records = self.read_records(parity)
        slow = [rank for rank, record in records.items() if record.writing]
        if not slow:
            return "a rank that was admitted to the round, to begin to write"
        return f"{format_ranks(slow)}, admitted to the round, to finish writing"


def _policy(settings: Settings, what: str, table: ShapeTable) -> ShapePolicy:
    """Return the shape policy; ``table`` is for shapes that differ between rounds."""
    if settings.has_one_shape:
        return FixedShape(settings, what)
    policy = RowShapes if settings.is_sparse else ShapePerRound
    return policy(settings, what, table)
