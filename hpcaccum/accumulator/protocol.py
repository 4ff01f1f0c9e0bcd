"""The admission protocol: which round a gradient joins, and when a round closes.

The rules are in docs/architecture.md, "The protocol"; tests/model/accumulator.pml is
their model. All words are on the node of the host, and are changed by its ranks only.
For a rank of another node, the agent of that node does what the rank would do: see
`host_calls`. `AdmissionProtocol` has the words and what writers do with them; `take`
has what takes do.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from hpcaccum.accumulator.membership import Membership
from hpcaccum.accumulator.receipts import Counters, Receipt
from hpcaccum.accumulator.settings import SUM, Settings, Shape
from hpcaccum.accumulator.shapes import RowShapes, Shapes, ShapeTable
from hpcaccum.accumulator.state import Packing, Record, State, WordLayout, admits
from hpcaccum.accumulator.turns import TicketLock
from hpcaccum.errors import InvalidArgumentError, format_ranks
from hpcaccum.mpi import AtomicWords, Group, bits, number_of
from hpcaccum.nodes import words_of

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
# The intents of two ranks are on different cache lines.
_APART = 8


# The first buffers that a rank has for a round, by parity.
Fresh = tuple["int | None", "int | None"]


class Request(NamedTuple):
    """What a rank asks for: that a gradient is admitted.

    Attributes:
        local_step: The step at which it was computed.
        weight: What it counts.
        shape, misfit: What decides whether it fits the round: its shape, or that of its
            rows, None if it is that of all rounds; and why it fits none, or None.
        fresh: The first buffer that its rank has for a round, by parity; None if it has
            none at the moment.
        in_place: Whether the gradient is in that buffer, or comes as ``contents``.
        scaled: Whether it is multiplied by its weight when it is written.
        contents: Of the buffer, of which the agent keeps a copy; None if it does not.
    """

    local_step: int
    weight: float
    shape: Shape | None
    misfit: str | None
    fresh: Fresh
    in_place: bool
    scaled: bool
    contents: bytes | None = None


class Admitted(NamedTuple):
    """What became of a gradient.

    Attributes:
        receipt: None if it can be neither admitted nor dropped at the moment.
        parity: Of the open round.
        before: What its rank had in the round; None if nothing.
        record: What it has, once the gradient is in place.
        complete: Whether it was admitted, and is in place; if not, it must be written.
    """

    receipt: Receipt | None
    parity: int
    before: Record | None = None
    record: Record | None = None
    complete: bool = False


class AdmissionProtocol:
    """The words of one accumulator, and the admission of gradients. Collective.

    Attributes:
        what: What messages begin with.
        words: All words.
        shapes: Which shapes fit a round.
        membership: Which ranks contribute.
        take_lock: Held by the take that has its turn, first come, first served.
        counters: What happened to the gradients of each rank.
        max_lag: By how many steps a gradient may be late.
        apart: Whether a rank that adds a gradient spoils no more than its own sum.
        mean: Whether results are means.
    """

    def __init__(self, group: Group, settings: Settings, what: str) -> None:
        rank, n = group.rank, group.size
        self.what, self._rank, self._size = what, rank, n
        self.apart, self.mean = settings.storage != SUM, settings.reduction == "MEAN"
        self._late, self.max_lag = settings.late, 1 if settings.late else 0
        self.packing = Packing(shaped=not settings.has_one_shape)
        layout = WordLayout(_FIXED.count)
        members = layout.take(Membership.words(n))
        lock = layout.take(TicketLock.words(n))
        # By parity, and then by rank.
        self._records = layout.take(2 * n)
        self._weights = layout.take(2 * n)
        self._intents = layout.take(_APART * n, own_lines=True)
        counters = layout.take(Counters.words(n))
        limit = self.packing.max_shapes
        table = layout.take(ShapeTable.words(limit))
        self.words: AtomicWords = words_of(group, settings.host, layout.count, what)
        words = self.words
        self.membership = Membership(words, members, rank, n, settings.workers)
        self.take_lock = TicketLock(words, lock, n, self.membership.dead)
        self.counters = Counters(words, counters, n)
        shapes = RowShapes if settings.is_sparse else Shapes
        self.shapes = shapes(settings, what, ShapeTable(words, table, limit))

    def state(self) -> State:
        """Return the state now."""
        return self.packing.unpack(self.words.read(STATE))

    def swap(self, old: State, new: State) -> bool:
        """Replace the state if it is ``old``; return whether it was."""
        word = self.packing.pack(old)
        return self.words.compare_and_swap(STATE, word, self.packing.pack(new)) == word

    def set_step(self, step: int) -> int:
        """Set the step; return what it was before."""
        limit = self.packing.max_first_step
        if abs(step) > limit:
            raise InvalidArgumentError(
                f"{self.what}: step must be within +-{limit}, got {step}"
            )
        while True:
            state = self.state()
            if self.swap(state, state._replace(step=step)):
                return state.step

    # Admission, on the host's node

    def admit(self, rank: int, request: Request) -> Admitted:
        """Admit a gradient of a rank to the open round, or drop it.

        The rank has no other gradient on its way. If this one is admitted, `arrive`
        comes when it is in its buffer. A shape that does not fit, and a full round,
        raise InvalidArgumentError.
        """
        words, memory = self.words, self.words.memory
        word, local_step = words.read(STATE), request.local_step
        intent = self._intents + _APART * rank
        while True:
            state = self.packing.unpack(word)
            step, parity = state.step, state.parity
            if not admits(step, local_step, self.max_lag):
                self.counters.count(rank, False, step - local_step)
                return Admitted(Receipt(False, local_step, step), parity)
            shape = 0
            if request.shape is not None:
                shape = self.shapes.number(request.shape, request.misfit, state.shape)
            if state.number >= self.packing.max_count and not state.waiting:
                raise InvalidArgumentError(
                    f"{self.what}: a round holds at most {self.packing.max_count} "
                    f"gradients; take them first"
                )
            # What the rank has in the round; nobody else changes it until a take.
            index, fresh = parity * self._size + rank, request.fresh[parity]
            had = memory[self._records + index]
            held = None
            if had:
                held = Record.of(had, number_of(memory[self._weights + index]))
            elif fresh is None:
                return Admitted(None, parity)
            memory[intent] = 1 + parity
            new = self.packing.pack(state.admitted(shape))
            found = words.compare_and_swap(STATE, word, new)
            if found == word:
                break
            memory[intent], word = 0, found
        factor = self._late if local_step < step else 1.0
        weight = factor * request.weight
        if held is None:
            assert fresh is not None
            copied = request.contents is not None
            scaled = int(request.scaled)
            record = Record(fresh, 1, 0, shape, int(copied), scaled, weight)
        else:
            record = held.written(weight)._replace(shape=shape)
        complete = held is None and request.in_place and self.apart
        if held or not self.apart:
            adding = record._replace(number=record.number - 1, adding=1)
            words.write(self._records + index, adding.word())
        receipt = Receipt(True, local_step, step, factor=factor)
        return Admitted(receipt, parity, held, record, complete)

    def arrive(self, rank: int, admitted: Admitted) -> None:
        """Publish what a rank has in a round, and then that it has no intent.

        Without a receipt, its last gradient does not come. Raises LostRankError if the
        rank was given up: the round may be over without it.
        """
        self.membership.check_counts(rank)
        if admitted.receipt is not None:
            # Before its record, so that a gradient that was taken is in the counts.
            self.counters.count(rank, True, admitted.receipt.lag)
        memory, index = self.words.memory, admitted.parity * self._size + rank
        record, word = admitted.record, 0
        if record:
            # Before the record, so that a rank that reads the record finds its weight.
            memory[self._weights + index] = bits(record.weight)
            word = record.word()
        self.words.write(self._records + index, word)
        memory[self._intents + _APART * rank] = 0

    # What takes, and messages, need; messages on any rank

    def open_intents(self, parity: int) -> list[int]:
        """Return the ranks that are not lost and may join the round of a parity."""
        words = self.words.read_range(self._intents, _APART * self._size)[::_APART]
        ranks = [rank for rank, word in enumerate(words) if word == 1 + parity]
        if ranks:
            lost = self.membership.lost()
            ranks = [rank for rank in ranks if rank not in lost]
        return ranks

    def is_joined(self) -> bool:
        """Whether a rank may be writing a gradient; on the host's node."""
        end = self._intents + _APART * self._size
        words = self.words.memory[self._intents : end : _APART]
        return any(words.tolist()) and any(map(self.open_intents, range(2)))

    def holds_gradient(self, parity: int) -> bool:
        """Return whether this rank has a record of the round of this parity."""
        return self.words.read(self._records + parity * self._size + self._rank) != 0

    def read_records(self, parity: int) -> dict[int, Record]:
        """Return the records of the ranks that have one."""
        begin, size = parity * self._size, self._size
        words = self.words.read_range(self._records + begin, size)
        # Not before the records.
        weights = self.words.read_range(self._weights + begin, size)
        numbers = struct.unpack(f"{size}d", struct.pack(f"{size}q", *weights))
        pairs = enumerate(zip(words, numbers, strict=True))
        return {rank: Record.of(*pair) for rank, pair in pairs if pair[0]}

    def clear_records(self, parity: int) -> None:
        """Clear the records of all ranks."""
        self.words.store(self._records + parity * self._size, [0] * self._size)

    def announce(self, wanted: int) -> None:
        """Publish how many gradients the take requires before it waits for them."""
        # Each request has its own tag: if WANT is the same before and after a read of
        # STATE, the two belong together.
        bits = self.packing.max_count.bit_length()
        tag = (self.words.read(WANT) >> bits) + 1
        self.words.write(WANT, tag << bits | wanted)

    def put_closing(self, word: int) -> None:
        """Record the STATE that the take closes, before it does."""
        self.words.memory[CLOSED] = word

    def closing(self) -> State | None:
        """Return what the last take recorded; None if it is complete."""
        word = self.words.read(CLOSED)
        return self.packing.unpack(word) if word else None

    def add_lost(self, number: int) -> None:
        """Count gradients that are lost; for the take that has its turn."""
        self.words.write(_NUM_LOST, self.words.read(_NUM_LOST) + number)

    def weight(self) -> float:
        """Return the sum of the weights of what is in place, and not returned yet."""
        both = [self.read_records(parity).values() for parity in range(2)]
        return sum(each.weight for found in both for each in found if each.number)

    def num_lost(self) -> int:
        """Return how many gradients were admitted and lost."""
        return self.words.read(_NUM_LOST)

    def count(self) -> int:
        """Return how many gradients no take has returned yet.

        Also those of a round that a take closed and could not finish.
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
            return self.missing(members.quorum(required, members.changes()))
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
