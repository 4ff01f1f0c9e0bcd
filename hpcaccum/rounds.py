"""The admission protocol: which round a gradient belongs to, and when a round closes.

No lock is held while a gradient travels. One 64-bit word, STATE, decides by
compare-and-swap who is admitted to which round; the payload moves afterwards, and DONE
counts the payloads that have arrived. Rounds have a parity: while one is being reduced,
the other parity is open. A taker clears the records of a parity before it passes the
turn on, hence before that parity can be opened again.

A take that finds too few gradients does not watch the count: it turns the count in
STATE into the number still missing. The writer that brings it to zero closes the round
in the same compare-and-swap, so no gradient can slip in between the last one that was
wanted and the close; this is how TensorFlow's queue behaves.

The protocol is model-checked: tests/model/accumulator.pml.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from hpcaccum.errors import EverybodyLeftError, InvalidArgumentError
from hpcaccum.group import ranks_text
from hpcaccum.ledger import Ledger, Receipt
from hpcaccum.line import Line
from hpcaccum.window import Cells

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hpcaccum.deadline import Deadline
    from hpcaccum.group import Group

# Host words. STATE is alone on its cache line.
_STATE, _WANT, _DONE, _CLOSED, _LEFT, _HEAD = 0, 8, 9, 11, 12, 13


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
        local_step: Of the last one.
    """

    buffer: int
    number: int
    writing: int
    shape: int
    local_step: int

    def words(self) -> tuple[int, int]:
        """Return it as two words; the first is 0 if there is nothing."""
        flags = self.writing << 1 | self.buffer
        return (self.shape << 32 | self.number) << 2 | flags, self.local_step

    @classmethod
    def of(cls, held: int, local_step: int) -> Record:
        """Return it from its two words."""
        rest = held >> 2
        return cls(held & 1, rest & 0xFFFFFFFF, held >> 1 & 1, rest >> 32, local_step)


@dataclass(frozen=True)
class Closed:
    """A round that nobody can join any more.

    Attributes:
        parity: Where its records are.
        count: The gradients in it.
        shape: Number of its shape; 0 if all rounds have one.
        records: Rank to record, of the ranks that have some; in rank order.
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
        ledger = self._records + 4 * n
        self._gone = ledger + Ledger.words(n)
        self.first_extra = self._gone + n
        self.cells = Cells(group, host, self.first_extra + extra)
        self._line = Line(self.cells, _HEAD, group.rank, n)
        self.ledger = Ledger(self.cells, ledger, group.rank, n)
        # The last word seen: a first guess, where reading it would cost a round trip.
        self._seen = 0

    def state(self) -> State:
        """Return the state now."""
        return self.packing.unpack(self.cells.read(_STATE))

    # Writers

    def admit(
        self, local_step: int, fit: Callable[[int], int]
    ) -> tuple[Receipt, int, int]:
        """Admit a gradient to the open round, or find it stale.

        Args:
            local_step: The step the gradient was computed at.
            fit: Gets the number of the round's shape (0: none yet) and returns that of
                the gradient's; raises if they differ.

        Returns:
            The receipt; the parity of the round; the number of its shape.
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
            found = self.cells.swap(_STATE, word, new)
            if found == word:
                self._seen = new
                return Receipt(True, local_step, state.step), state.parity, shape
            word, fresh = found, True

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

    def writing(self, parity: int, record: Record) -> None:
        """Say that this rank was admitted and begins to write."""
        self.cells.post(self._record(parity, self._group.rank), record.words())

    def written(self, parity: int, record: Record) -> None:
        """Say that the payload is in place."""
        index = self._record(parity, self._group.rank)
        self.cells.write_range(index, record.words())
        self.cells.add(_DONE + parity, 1)

    def _record(self, parity: int, rank: int) -> int:
        return self._records + 2 * (parity * self._group.size + rank)

    # Takers

    @contextlib.contextmanager
    def take(self, required: int, deadline: Deadline) -> Iterator[Closed]:
        """Close a round of ``required`` gradients or more; give it to the body.

        When the body is done the round is gone. If it fails, or the admitted writers
        do not finish in time, the round stays on record and the next take resumes it.

        Raises:
            WaitTimeoutError: Says what was missing.
            EverybodyLeftError: If all ranks have left and no gradient is there.
        """
        with self._line.turn(deadline):
            closed: tuple[int, int] | None = None
            try:
                parity, count = closed = self._close(required, deadline)
                self._await_writers(parity, count, deadline)
                records = self._read_records(parity)
                shape = max(record.shape for record in records.values())
                yield Closed(parity, count, shape, records)
            except BaseException:
                if closed:
                    self.cells.write(_CLOSED, closed[1] << 1 | closed[0])
                raise
            self._clear(parity)

    def _close(self, required: int, deadline: Deadline) -> tuple[int, int]:
        """Return parity and count of a closed round; this rank has the turn."""
        if word := self.cells.read(_CLOSED):
            return word & 1, word >> 1
        while True:
            left = self.cells.read(_LEFT)
            wanted = self.quorum(required, left)
            word = self.cells.read(_STATE)
            state = self.packing.unpack(word)
            if state.number < wanted:
                if self._stand(state, wanted, left, deadline):
                    return state.parity, wanted
            elif self._swap(state, state.closed()):
                return state.parity, state.number

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
            if words[_LEFT] == self.workers:
                self._check_anything(state.parity, wanted)
            return False if words[_LEFT] != left else None

        try:
            closed = deadline.wait(look, lambda: self._missing(wanted))
        except BaseException:
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
            if self._swap(
                state, state._replace(waiting=0, number=wanted - state.number)
            ):
                return False

    def _await_writers(self, parity: int, count: int, deadline: Deadline) -> None:
        deadline.wait(
            lambda: self.cells.read(_DONE + parity) == count or None,
            lambda: self._unfinished(parity),
        )

    def _read_records(self, parity: int) -> dict[int, Record]:
        n = self._group.size
        words = self.cells.read_range(self._record(parity, 0), 2 * n)
        return {
            rank: Record.of(words[2 * rank], words[2 * rank + 1])
            for rank in range(n)
            if words[2 * rank]
        }

    def _clear(self, parity: int) -> None:
        # All before the turn is passed on: then this parity may be opened again.
        zeros = [0] * (2 * self._group.size)
        self.cells.write_range(self._record(parity, 0), zeros)
        self.cells.write(_DONE + parity, 0)
        self.cells.write(_CLOSED, 0)

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
            on_record = self.cells.read(_CLOSED) >> 1
            state = self.state()
            if not state.waiting:
                return on_record + state.number
            if self.cells.read(_WANT) == want:
                return on_record + (want & (1 << bits) - 1) - state.number

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
        """Say that this rank brings no more gradients; once is enough."""
        if not self.cells.swap(self._gone + self._group.rank, 0, 1):
            self.cells.add(_LEFT, 1)

    def left(self) -> list[int]:
        """Return the ranks that have left."""
        words = self.cells.read_range(self._gone, self._group.size)
        return [rank for rank, gone in enumerate(words) if gone]

    def free(self) -> None:
        """Free the words. Collective."""
        self.cells.free()
