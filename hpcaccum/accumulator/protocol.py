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

from typing import TYPE_CHECKING, TypeVar

from hpcaccum.accumulator.receipts import Receipt
from hpcaccum.accumulator.state import Closed, Record, State
from hpcaccum.accumulator.words import CLOSED, MEMBERS, STATE, WANT, RoundWords
from hpcaccum.errors import EverybodyLeftError, InvalidArgumentError, WaitTimeoutError
from hpcaccum.mpi import Attempt

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpcaccum.deadline import Deadline
    from hpcaccum.mpi import Group

T = TypeVar("T")

# The receipt of a gradient, the parity of its round, the number of the round's shape.
Admitted = tuple[Receipt, int, int]


class Rounds(RoundWords):
    """What may be done with the words of one accumulator; see `RoundWords`."""

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
        super().__init__(group, host, what, workers=workers, shaped=shaped, extra=extra)
        # The last word seen: a first guess, where reading it would cost a round trip.
        self._seen = 0
        # What an exception in the midst of a call is recovered from. Of the writer:
        self.admission, self._fitted = Attempt(), 0
        # Of the take that has the turn: the round that it means to close, as it will be
        # then; and what is known of it once nothing may be added or lost any more.
        self._closing: State | None = None
        self._complete: Closed | None = None

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
        if self.words.direct:
            word, fresh = self.words.read(STATE), True
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
                word, fresh = self.words.read(STATE), True
                continue
            if shape < 0:
                self._seen = word
                return Receipt(False, local_step, state.step), state.parity, 0
            if only is not None and only != state.parity:
                if fresh:
                    return None
                word, fresh = self.words.read(STATE), True
                continue
            self._fitted = shape
            found = self.words.compare_and_swap(STATE, word, new, self.admission)
            if found == word:
                self._seen = new
                return Receipt(True, local_step, state.step), state.parity, shape
            word, fresh = found, True

    def is_stale(self, local_step: int, *, ask: bool) -> bool:
        """Whether a gradient is stale by the last word seen; of now, if that is near.

        Args:
            local_step: The step the gradient was computed at.
            ask: Whether to ask the host if it is not near.
        """
        if ask or self.words.direct:
            self._seen = self.words.read(STATE)
        return local_step < self.packing.unpack(self._seen).step

    def admitted(self, local_step: int) -> Admitted | None:
        """Return what `admit` returned, or was about to return, if it admitted.

        For a caller that did not get the result because of an exception. The caller
        resets `admission` before each gradient.
        """
        self.words.settle()
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
            if self.words.compare_and_swap(STATE, word, new, attempt) == word:
                return True

    def _next(self, state: State, shape: int) -> int:
        if not state.waiting and state.number >= self.packing.max_count:
            raise InvalidArgumentError(
                f"{self._what}: a round holds at most {self.packing.max_count} "
                f"gradients; take them first"
            )
        return self.packing.pack(state.admitted(shape))

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
        return self.line.hold(
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
        self.words.settle()
        closing, complete = self._closing, self._complete
        if closing and complete:
            self._finish(closing, complete, clear)
        elif closing and self._is_closed(closing):
            self.words.write(CLOSED, self.packing.pack(closing))

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
        self.words.write_range(self._record(closed.parity, 0), [0] * self._group.size)
        self.words.write(CLOSED, 0)

    def _step_back(self, closing: State) -> None:
        """Undo the step of a round that came to nothing, unless it was set since."""
        while (state := self.state()).step == closing.step + 1:
            if self._swap(state, state._replace(step=closing.step)):
                return

    def _close(self, required: int, deadline: Deadline) -> State:
        """Return a round that is closed, as it was then; this rank has the turn."""
        if word := self.words.read(CLOSED):
            self._closing = self.packing.unpack(word)
            return self._closing
        while True:
            left = self.membership.num_left()
            wanted = self.membership.quorum(required, left)
            state = self.state()
            # Before the swap: an exception may hide whether it succeeded.
            self._closing = closing = state._replace(number=max(wanted, state.number))
            if state.number < wanted:
                if self._stand(state, wanted, left, deadline):
                    return closing
            elif self._swap(state, state.closed()):
                return closing

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
            words = self.words.read_range(STATE, MEMBERS + 1)
            now = self.packing.unpack(words[STATE])
            if now.parity != state.parity:
                return True
            if now.shape and now.number == wanted:
                # The gradient that had this shape was given up.
                self._swap(now, now._replace(shape=0))
            if self.membership.all_left(words[MEMBERS]):
                self._check_anything(state.parity, wanted)
            return False if words[MEMBERS] != left else None

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
                f"{self._what}: all {self.membership.workers} ranks have left and no "
                f"gradient is there"
            )

    def _announce(self, wanted: int) -> None:
        # Each request has its own tag: whoever reads the same word twice around
        # STATE knows that both belong together.
        bits = self.packing.max_count.bit_length()
        tag = (self.words.read(WANT) >> bits) + 1
        self.words.write(WANT, tag << bits | wanted)

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
