"""The words of one accumulator on its host: what they say, and who writes which."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpcaccum.accumulator.membership import Membership
from hpcaccum.accumulator.receipts import Counters
from hpcaccum.accumulator.state import Packing, Record, State
from hpcaccum.accumulator.ticket_lock import TicketLock
from hpcaccum.accumulator.word_layout import WordLayout
from hpcaccum.errors import InvalidArgumentError, format_ranks
from hpcaccum.mpi import AtomicWords

if TYPE_CHECKING:
    from hpcaccum.mpi import Group

# Every swap of STATE must not slow down those who read other words.
_FIXED = WordLayout()
STATE = _FIXED.take(own_lines=True)
WANT = _FIXED.take()
CLOSED = _FIXED.take()
# The words of `Membership`. The first follows the others, for one read of all.
MEMBERS = _FIXED.count


class RoundWords:
    """The words of one accumulator on its host. Collective.

    Args:
        group: The ranks.
        host: The rank whose memory holds the words.
        what: Name for messages.
        workers: How many ranks contribute. If not all, the host does not.
        shaped: Whether rounds have a shape of their own.
        extra: AtomicWords that the caller wants besides, at ``first_extra``.
    """

    def __init__(
        self,
        group: Group,
        host: int,
        what: str,
        *,
        workers: int,
        shaped: bool,
        extra: int = 0,
    ) -> None:
        self._group, self._what, rank, n = group, what, group.rank, group.size
        self.packing = Packing(shaped=shaped)
        layout = WordLayout(after=_FIXED)
        members = layout.take(Membership.words(n))
        line = layout.take(TicketLock.words(n))
        self._records = layout.take(2 * n)
        ledger = layout.take(Counters.words(n))
        self.first_extra = layout.take(extra)
        self.words = AtomicWords(group, host, layout.count)
        self.membership = Membership(self.words, members, rank, n, workers)
        self.line = TicketLock(self.words, line, rank, n)
        self.ledger = Counters(self.words, ledger, rank, n)

    def state(self) -> State:
        """Return the state now."""
        return self.packing.unpack(self.words.read(STATE))

    def holds(self, parity: int, rank: int) -> bool:
        """Whether a round of this parity has something of this rank."""
        return self.words.read(self._record(parity, rank)) != 0

    def writes(self, parity: int) -> bool:
        """Whether this rank's record says that it is still writing."""
        index = self._record(parity, self._group.rank)
        return bool(Record.of(self.words.read(index)).writing)

    def writing(self, parity: int, record: Record) -> None:
        """Say that this rank was admitted and begins to write."""
        self.words.store(self._record(parity, self._group.rank), [record.word()])

    def put_record(self, parity: int, record: Record | None) -> None:
        """Say what this rank has in the round: that the payload is in place."""
        index = self._record(parity, self._group.rank)
        self.words.write(index, record.word() if record else 0)

    def _record(self, parity: int, rank: int) -> int:
        return self._records + parity * self._group.size + rank

    def _read_records(self, parity: int) -> dict[int, Record]:
        words = self.words.read_range(self._record(parity, 0), self._group.size)
        return {rank: Record.of(word) for rank, word in enumerate(words) if word}

    def _swap(self, old: State, new: State) -> bool:
        word = self.packing.pack(old)
        return self.words.compare_and_swap(STATE, word, self.packing.pack(new)) == word

    def _missing(self, wanted: int) -> str:
        state = self.state()
        records = self._read_records(state.parity)
        had = self.count()
        silent = self.membership.present() - set(records)
        return (
            f"{wanted} gradients at step {state.step}, had {had} "
            f"(nothing from {format_ranks(silent)})"
        )

    def awaited(self, required: int, step: int) -> str | None:
        """Return what the round of a step lacks, if anything; any rank may ask."""
        state = self.state()
        if state.step <= step:
            members = self.membership
            return self._missing(members.quorum(required, members.num_left()))
        records = self._read_records(1 - state.parity).values()
        writing = any(record.writing for record in records)
        return self._unfinished(1 - state.parity) if writing else None

    def _unfinished(self, parity: int) -> str:
        records = self._read_records(parity)
        slow = [rank for rank, record in records.items() if record.writing]
        if not slow:
            return "a rank that was admitted to the round, to begin to write"
        return f"{format_ranks(slow)}, admitted to the round, to finish writing"

    def count(self) -> int:
        """Return how many gradients no take has handed out.

        Those of the open round, and of one that a take closed and could not finish.
        """
        bits = self.packing.max_count.bit_length()
        while True:
            want = self.words.read(WANT)
            on_record = self._on_record()
            state = self.state()
            if not state.waiting:
                return on_record + state.number
            if self.words.read(WANT) == want:
                return on_record + (want & (1 << bits) - 1) - state.number

    def _on_record(self) -> int:
        word = self.words.read(CLOSED)
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

    def free(self) -> None:
        """Free the words. Collective."""
        self.words.free()
