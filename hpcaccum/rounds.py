"""The admission protocol: which round a gradient belongs to, and when a round closes.

No lock is held while a gradient travels. One 64-bit word, STATE, decides by
compare-and-swap who is admitted to which round; the payload moves afterwards. Each rank
has a record of each round, a word that only it writes: how many of its gradients have
arrived. Rounds have a parity: while one is being reduced, the other parity is open. A
taker clears the records of a parity before it passes the turn on, hence before that
parity can be opened again.

A take that finds too few gradients does not watch the count: it turns the count in
STATE into the number still missing. The writer that brings it to zero closes the round
in the same compare-and-swap, so no gradient can slip in between the last one that was
wanted and the close; this is how TensorFlow's queue behaves.

An exception may come at any point: a timeout, too little memory, a signal handler that
raises. A gradient that was admitted and cannot be written is taken out of the count
while its round is open; afterwards its rank's record says that it was given up, and the
take leaves it out. A take that fails goes back to waiting for nothing; if its round is
closed by then, the round stays on record in CLOSED and the next take resumes it.

The protocol is model-checked: tests/model/accumulator.pml.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from hpcaccum.errors import (
    EverybodyLeftError,
    InvalidArgumentError,
    WaitTimeoutError,
)
from hpcaccum.group import ranks_text
from hpcaccum.ledger import Ledger, Receipt
from hpcaccum.line import Line
from hpcaccum.window import Attempt, Cells

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpcaccum.deadline import Deadline
    from hpcaccum.group import Group

T = TypeVar("T")

# Host words. STATE is alone on its cache line.
_STATE, _WANT, _CLOSED, _LEFT, _HEAD = 0, 8, 9, 10, 11


class State(NamedTuple):
    """The word that decides.

    Attributes:
        step: The accumulator's step.
        shape: Number of the shape that the round has; 0 while it has none.
        parity: Of the open round.
        waiting: Whether a take stands at the head and wants more.
        number: Gradients admitted to the round; if ``waiting``, those still missing.
    """

    step: int
    shape: int
    parity: int
    waiting: int
    number: int

    def admitted(self, shape: int) -> State:
        """Return the state after one more gradient; the last missing one closes."""
        step, _, parity, waiting, number = self
        if not waiting:
            return State(step, shape, parity, 0, number + 1)
        if number > 1:
            return State(step, shape, parity, 1, number - 1)
        return self.closed()

    def closed(self) -> State:
        """Return the state after the round is closed."""
        return State(self.step + 1, 0, 1 - self.parity, 0, 0)

    def withdrawn(self) -> State:
        """Return the state after one gradient less."""
        if self.waiting:
            return self._replace(number=self.number + 1)
        return self._replace(number=self.number - 1)._unshaped()

    def stood_down(self, wanted: int) -> State:
        """Return the state after a take that waits for ``wanted`` gives up."""
        return self._replace(waiting=0, number=wanted - self.number)._unshaped()

    def _unshaped(self) -> State:
        return self if self.number else self._replace(shape=0)


class Packing:
    """How a `State` lies in 64 bits: step | shape | parity | waiting | count.

    Attributes:
        max_count: Most gradients in one round.
        max_step: Steps lie between -max_step - 1 and this.
        max_shapes: Most different shapes; 0 if the shape is fixed.
    """

    def __init__(self, *, shaped: bool) -> None:
        self._count = 18 if shaped else 20
        self._shape = 10 if shaped else 0
        self.max_count = (1 << self._count) - 1
        self.max_shapes = (1 << self._shape) - 1
        self._step_shift = self._count + 2 + self._shape
        self.max_step = (1 << (63 - self._step_shift)) - 1

    def pack(self, state: State) -> int:
        """Return the word."""
        low = (state.shape << 1 | state.parity) << 1 | state.waiting
        return state.step << self._step_shift | low << self._count | state.number

    def unpack(self, word: int) -> State:
        """Return the state."""
        low = word >> self._count
        return State(
            word >> self._step_shift,
            low >> 2 & self.max_shapes,
            low >> 1 & 1,
            low & 1,
            word & self.max_count,
        )


class Record(NamedTuple):
    """What one rank has in one round: a buffer with the sum of ``number`` gradients.

    Attributes:
        writing: Whether one more was admitted and is not completely written.
        shape: Number of the shape; 0 if all rounds have one.
        given_up: Gradients that were admitted and will not be written.
    """

    buffer: int
    number: int
    writing: int
    shape: int
    given_up: int = 0

    def word(self) -> int:
        """Return it as one word."""
        counts = (self.shape << 20 | self.given_up) << 20 | self.number
        return (counts << 1 | self.writing) << 1 | self.buffer

    @classmethod
    def of(cls, word: int) -> Record:
        """Return it from its word."""
        counts = word >> 2
        number, given_up = counts & _MAX_NUMBER, counts >> 20 & _MAX_NUMBER
        return cls(word & 1, number, word >> 1 & 1, counts >> 40, given_up)


_MAX_NUMBER = (1 << 20) - 1


# The receipt of a gradient, the parity of its round, the number of the round's shape.
Admitted = tuple[Receipt, int, int]


@dataclass(frozen=True)
class Closed:
    """A round that nobody can join any more.

    Attributes:
        parity: Where its records are.
        count: The gradients in it, without those that were given up.
        shape: Number of its shape; 0 if all rounds have one.
        records: Rank to record, of the ranks that have gradients; in rank order.
    """

    parity: int
    count: int
    shape: int
    records: dict[int, Record]


class Rounds:
    """The words of one accumulator on its host, and what may be done with them.

    Args:
        group: The ranks.
        host: The rank whose memory holds the words.
        what: Name for messages.
        shaped: Whether rounds have a shape of their own.
        extra: Cells that the caller wants besides, at ``first_extra``.
    """

    def __init__(
        self, group: Group, host: int, what: str, *, shaped: bool, extra: int = 0
    ) -> None:
        self._group, self._what, n = group, what, group.size
        self.packing = Packing(shaped=shaped)
        # How many ranks bring gradients, and may leave; if not all, not the host.
        self.workers = n
        self._records = _HEAD + 1 + n
        ledger = self._records + 2 * n
        self._gone = ledger + Ledger.words(n)
        self.first_extra = self._gone + n
        self.cells = Cells(group, host, self.first_extra + extra)
        self._line = Line(self.cells, _HEAD, group.rank, n)
        self.ledger = Ledger(self.cells, ledger, group.rank, n)
        # The last word seen: a first guess, where reading it would cost a round trip.
        self._seen = 0
        # What an exception in the midst of a call is recovered from. Of the writer:
        self.admission, self._fitted = Attempt(), 0
        self._leaving = Attempt()
        # Of the take that has the turn: the round that it means to close, as it will be
        # then; and what is known of it once nothing may be added or lost any more.
        self._closing: State | None = None
        self._complete: Closed | None = None

    def state(self) -> State:
        """Return the state now."""
        return self.packing.unpack(self.cells.read(_STATE))

    # Writers

    def admit(
        self, local_step: int, fit: Callable[[int], int], only: int | None = None
    ) -> Admitted | None:
        """Admit a gradient to the open round, or find it stale.

        Args:
            local_step: The step the gradient was computed at.
            fit: Gets the number of the round's shape (0: none yet) and returns that of
                the gradient's; raises if they differ.
            only: Parity to which the gradient may be admitted, if not to both.

        Returns:
            None if the parity that is open is not ``only``.
        """
        word, fresh = self._seen, False
        if self.cells.direct:
            word, fresh = self.cells.read(_STATE), True
        while True:
            state = self.packing.unpack(word)
            try:
                stale = local_step < state.step
                shape = -1 if stale else fit(state.shape)
                new = 0 if stale else self._next(state, shape)
            except InvalidArgumentError:
                if fresh:
                    raise
                shape = -1
            if shape < 0 and not fresh:
                # What speaks against the gradient must be true now.
                word, fresh = self.cells.read(_STATE), True
                continue
            if shape < 0:
                self._seen = word
                return Receipt(False, local_step, state.step), state.parity, 0
            if only is not None and only != state.parity:
                if fresh:
                    return None
                word, fresh = self.cells.read(_STATE), True
                continue
            self._fitted = shape
            found = self.cells.swap(_STATE, word, new, self.admission)
            if found == word:
                self._seen = new
                return Receipt(True, local_step, state.step), state.parity, shape
            word, fresh = found, True

    def admitted(self, local_step: int) -> Admitted | None:
        """Return what `admit` returned, or was about to return, if it admitted.

        For a caller that did not get the result because of an exception. The caller
        resets `admission` before each gradient.
        """
        self.cells.flush()
        if not self.admission.swapped:
            return None
        state = self.packing.unpack(int(self.admission.compare[0]))
        return Receipt(True, local_step, state.step), state.parity, self._fitted

    def withdraw(self, parity: int, record: Record | None, attempt: Attempt) -> bool:
        """Take the admission of this rank's last gradient back; False if too late.

        Args:
            parity: Of the round. It cannot have been opened again: without the gradient
                it is not complete.
            record: What this rank has in the round without that gradient.
            attempt: Holds the outcome, if an exception comes.
        """
        while True:
            state = self.state()
            if state.parity != parity:
                return False
            # First: as soon as nobody waits for this rank any more, the round may go.
            self.put_record(parity, record)
            word, new = self.packing.pack(state), self.packing.pack(state.withdrawn())
            if self.cells.swap(_STATE, word, new, attempt) == word:
                return True

    def _next(self, state: State, shape: int) -> int:
        if not state.waiting and state.number >= self.packing.max_count:
            raise InvalidArgumentError(
                f"{self._what}: a round holds at most {self.packing.max_count} "
                f"gradients; take them first"
            )
        return self.packing.pack(state.admitted(shape))

    def holds(self, parity: int, rank: int) -> bool:
        """Whether a round of this parity has something of this rank."""
        return self.cells.read(self._record(parity, rank)) != 0

    def writes(self, parity: int) -> bool:
        """Whether this rank's record says that it is still writing."""
        index = self._record(parity, self._group.rank)
        return bool(Record.of(self.cells.read(index)).writing)

    def writing(self, parity: int, record: Record) -> None:
        """Say that this rank was admitted and begins to write."""
        self.cells.post(self._record(parity, self._group.rank), [record.word()])

    def put_record(self, parity: int, record: Record | None) -> None:
        """Say what this rank has in the round: that the payload is in place."""
        index = self._record(parity, self._group.rank)
        self.cells.write(index, record.word() if record else 0)

    def _record(self, parity: int, rank: int) -> int:
        return self._records + parity * self._group.size + rank

    # Takers

    def take(
        self,
        required: int,
        deadline: Deadline,
        reduce: Callable[[Closed], T],
        clear: Callable[[Closed], object],
    ) -> T:
        """Close a round of ``required`` gradients or more; reduce it.

        If it fails before ``clear`` is called, or the admitted writers do not finish in
        time, the round stays on record and the next take resumes it.

        Args:
            required: Gradients to wait for.
            deadline: Of the call.
            reduce: Gets the round and returns its result; may fail.
            clear: Makes room for the next round of this parity, without fail; is called
                again if a signal handler raises in it.

        Returns:
            What ``reduce`` returned.

        Raises:
            WaitTimeoutError: Says what was missing.
            EverybodyLeftError: If all ranks have left and no gradient is there.
        """
        return self._line.turn(
            deadline, lambda: self._take(required, deadline, reduce, clear)
        )

    def _take(
        self,
        required: int,
        deadline: Deadline,
        reduce: Callable[[Closed], T],
        clear: Callable[[Closed], object],
    ) -> T:
        self._closing = self._complete = None
        try:
            while True:
                closing = self._close(required, deadline)
                closed = self._await_writers(closing, deadline)
                if closed.count:
                    result = reduce(closed)
                self._complete = closed
                self._finish(closing, closed, clear)
                if closed.count:
                    return result
                # All of them were given up: there is nothing to return.
                self._closing = self._complete = None
        except BaseException:
            # A signal handler may raise here too, and nobody else can do this.
            try:
                self._put_back(clear)
            except BaseException:
                self._put_back(clear)
                raise
            raise

    def _put_back(self, clear: Callable[[Closed], object]) -> None:
        """Leave a take that failed as if it had not begun, or was over."""
        self.cells.flush()
        closing, complete = self._closing, self._complete
        if closing and complete:
            self._finish(closing, complete, clear)
        elif closing and self._is_closed(closing):
            self.cells.write(_CLOSED, self.packing.pack(closing))

    def _is_closed(self, closing: State) -> bool:
        state = self.state()
        if state.parity == closing.parity and state.waiting:
            return self._stand_down(closing.parity, closing.number)
        return state.parity != closing.parity

    def _finish(
        self, closing: State, closed: Closed, clear: Callable[[Closed], object]
    ) -> None:
        if closed.count:
            clear(closed)
        else:
            self._step_back(closing)
        # All before the turn is passed on: then this parity may be opened again.
        self.cells.write_range(self._record(closed.parity, 0), [0] * self._group.size)
        self.cells.write(_CLOSED, 0)

    def _step_back(self, closing: State) -> None:
        """Undo the step of a round that came to nothing, unless it was set since."""
        while (state := self.state()).step == closing.step + 1:
            if self._swap(state, state._replace(step=closing.step)):
                return

    def _close(self, required: int, deadline: Deadline) -> State:
        """Return a round that is closed, as it was then; this rank has the turn."""
        if word := self.cells.read(_CLOSED):
            self._closing = self.packing.unpack(word)
            return self._closing
        while True:
            left = self.cells.read(_LEFT)
            wanted = self.quorum(required, left)
            state = self.state()
            # Before the swap: an exception may hide whether it succeeded.
            self._closing = closing = state._replace(number=max(wanted, state.number))
            if state.number < wanted:
                if self._stand(state, wanted, left, deadline):
                    return closing
            elif self._swap(state, state.closed()):
                return closing

    def quorum(self, required: int, left: int) -> int:
        """Return how many gradients are enough now that ``left`` ranks have left."""
        present = self.workers - left
        if required <= self.workers:
            return max(1, min(required, present))
        return max(1, -(-required * present // self.workers))

    def _swap(self, old: State, new: State) -> bool:
        word = self.packing.pack(old)
        return self.cells.swap(_STATE, word, self.packing.pack(new)) == word

    def _stand(self, state: State, wanted: int, left: int, deadline: Deadline) -> bool:
        """Ask writers to close the round at ``wanted``; return whether they did.

        False if the round changed before it could be asked, or a rank left meanwhile.
        """
        self._announce(wanted)
        if not self._swap(
            state, state._replace(waiting=1, number=wanted - state.number)
        ):
            return False

        def look() -> bool | None:
            words = self.cells.read_range(_STATE, _LEFT + 1)
            now = self.packing.unpack(words[_STATE])
            if now.parity != state.parity:
                return True
            if now.shape and now.number == wanted:
                # The gradient that had this shape was given up.
                self._swap(now, now._replace(shape=0))
            if words[_LEFT] >= self.workers:
                self._check_anything(state.parity, wanted)
            return False if words[_LEFT] != left else None

        try:
            closed = deadline.wait(look, lambda: self._missing(wanted))
        except WaitTimeoutError:
            if self._stand_down(state.parity, wanted):
                return True
            raise
        return closed or self._stand_down(state.parity, wanted)

    def _check_anything(self, parity: int, wanted: int) -> None:
        # Only a STATE that is read after all have left has all of their gradients.
        now = self.state()
        if now.parity == parity and now.number == wanted:
            raise EverybodyLeftError(
                f"{self._what}: all {self.workers} ranks have left and no gradient is "
                f"there"
            )

    def _announce(self, wanted: int) -> None:
        # Each request has its own tag: whoever reads the same word twice around
        # STATE knows that both belong together.
        bits = self.packing.max_count.bit_length()
        tag = (self.cells.read(_WANT) >> bits) + 1
        self.cells.write(_WANT, tag << bits | wanted)

    def _stand_down(self, parity: int, wanted: int) -> bool:
        """Take the request back; return True if the round was closed all the same."""
        while True:
            state = self.state()
            if state.parity != parity:
                return True
            if self._swap(state, state.stood_down(wanted)):
                return False

    def _await_writers(self, closing: State, deadline: Deadline) -> Closed:
        """Return the round once all that were admitted have written, or given up."""

        def look() -> Closed | None:
            records = self._read_records(closing.parity)
            given_up = sum(record.given_up for record in records.values())
            count = sum(record.number for record in records.values())
            if count + given_up != closing.number:
                return None
            full = {rank: record for rank, record in records.items() if record.number}
            shape = max((record.shape for record in full.values()), default=0)
            return Closed(closing.parity, count, shape, full)

        return deadline.wait(look, lambda: self._unfinished(closing.parity))

    def _read_records(self, parity: int) -> dict[int, Record]:
        words = self.cells.read_range(self._record(parity, 0), self._group.size)
        return {rank: Record.of(word) for rank, word in enumerate(words) if word}

    # What messages say

    def _missing(self, wanted: int) -> str:
        state = self.state()
        records = self._read_records(state.parity)
        had = self.count()
        silent = set(range(self._group.size)) - set(records) - set(self.left())
        if self.workers < self._group.size:
            silent.discard(self.cells.host)
        return (
            f"{wanted} gradients at step {state.step}, had {had} "
            f"(nothing from {ranks_text(silent)})"
        )

    def awaited(self, required: int, step: int) -> str | None:
        """Return what the round of a step lacks, if anything; any rank may ask."""
        state = self.state()
        if state.step <= step:
            return self._missing(self.quorum(required, self.cells.read(_LEFT)))
        records = self._read_records(1 - state.parity).values()
        writing = any(record.writing for record in records)
        return self._unfinished(1 - state.parity) if writing else None

    def _unfinished(self, parity: int) -> str:
        records = self._read_records(parity)
        slow = [rank for rank, record in records.items() if record.writing]
        if not slow:
            return "a rank that was admitted to the round, to begin to write"
        return f"{ranks_text(slow)}, admitted to the round, to finish writing"

    # Everybody

    def count(self) -> int:
        """Return how many gradients no take has handed out.

        Those of the open round, and of one that a take closed and could not finish.
        """
        bits = self.packing.max_count.bit_length()
        while True:
            want = self.cells.read(_WANT)
            on_record = self._on_record()
            state = self.state()
            if not state.waiting:
                return on_record + state.number
            if self.cells.read(_WANT) == want:
                return on_record + (want & (1 << bits) - 1) - state.number

    def _on_record(self) -> int:
        word = self.cells.read(_CLOSED)
        if not word:
            return 0
        closed = self.packing.unpack(word)
        records = self._read_records(closed.parity).values()
        return closed.number - sum(record.given_up for record in records)

    def set_step(self, step: int) -> int:
        """Set the step, whatever it was; return what it was."""
        # Half of what there is room for: takes go on from here.
        limit = self.packing.max_step >> 1
        if not -limit - 1 <= step <= limit:
            raise InvalidArgumentError(
                f"{self._what}: step must be within +-{limit}, got {step}"
            )
        while True:
            state = self.state()
            if self._swap(state, state._replace(step=step)):
                return state.step

    def leave(self) -> None:
        """Say that this rank brings no more gradients; once is enough.

        If an exception comes, call it again.
        """
        self.cells.write(self._gone + self._group.rank, 1)
        if not self._leaving.added:
            self.cells.add(_LEFT, 1, self._leaving)

    def left(self) -> list[int]:
        """Return the ranks that have left."""
        words = self.cells.read_range(self._gone, self._group.size)
        return [rank for rank, gone in enumerate(words) if gone]

    def free(self) -> None:
        """Free the words. Collective."""
        self.cells.free()
