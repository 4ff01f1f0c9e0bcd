"""The center of a one-sided optimizer: how its servers update, show and save it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hpcaccum.optimizers.snapshot import COUNT, plain, snapshot_of
from hpcaccum.optimizers.update_rule import Rule
from hpcaccum.optimizers.variable import Variable
from hpcaccum.server import joined

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from hpcaccum.dtypes import Array
    from hpcaccum.optimizers.base import Optimizer
    from hpcaccum.optimizers.snapshot import Key, Parts, State
    from hpcaccum.optimizers.update_rule import Given
    from hpcaccum.server import ParameterServer

# What one of several servers has of a variable itself, beside its state.
_VALUE = "?value"

# A part of the state of a variable: its name and its value.
StatePart = tuple[str, Any]


class FlatRule:
    """The updates of a `Rule`, for a server that divides them among ranks."""

    def __init__(self, rule: Rule) -> None:
        self._rule = rule
        # Names to initial values.
        self.slots: Mapping[str, float] = rule._slots()
        # On the rank that counts updates.
        self._states: Sequence[State] = ()

    def set_variables(
        self, variables: Sequence[Variable], slots: Mapping[str, Mapping[str, Array]]
    ) -> None:
        """Let the rule keep its slots in given arrays."""
        self._states = [
            self._rule._state(var, {slot: slots[slot][var.name] for slot in slots})
            for var in variables
        ]

    def move_slots(self) -> None:
        """Move the slots to memory of their own, before the arrays are freed."""
        for state in self._states:
            state.move_slots()

    def numbers(self) -> tuple[float, ...] | None:
        """Return the numbers of the next update; None if they differ by variable."""
        earlier = {state.updates for state in self._states}
        if len(earlier) != 1:
            return None
        step = earlier.pop()
        return self._rule._numbers(self._rule._rate.at(lambda: step), step + 1)

    def rate(self) -> float | None:
        """Return the learning rate now; None if it depends on the updates so far."""
        rate = self._rule._rate
        return None if rate.takes_step else rate.at(lambda: 0)

    def apply(self, rate: float | None, grads: Given) -> None:
        """Update variables one by one, at the learning rate of the host if given."""
        self._rule._apply_at(rate, grads)

    def count(self) -> None:
        """Count an update of all variables; the first makes their state visible."""
        for state in self._states:
            state.count()

    def update(
        self,
        value: Array,
        grad: Array,
        slots: Sequence[Array],
        scratch: Array,
        numbers: Sequence[float],
    ) -> None:
        """Update some elements of the variables and of the slots."""
        self._rule._update(value, grad, *slots, scratch, *numbers)


def flat_rule(optimizer: Optimizer) -> FlatRule | None:
    """Return the updates of an optimizer as those of a vector, None if they are not.

    An optimizer of the user may be elementwise, but only a `Rule` can update pieces.
    """
    if isinstance(optimizer, Rule) and optimizer.elementwise:
        return FlatRule(optimizer)
    return None


class Center:
    """The variables of a parameter server, and the state that an optimizer keeps.

    On ranks that are no servers it is empty. ``flat`` has the updates of ``inner`` as
    those of a vector, if the server may call it instead; ``values`` are all variables
    of this rank.
    """

    def __init__(
        self,
        inner: Optimizer,
        flat: FlatRule | None,
        server: ParameterServer,
        values: Mapping[str, Array],
    ) -> None:
        self._inner, self._flat, self._server = inner, flat, server
        self._values = values
        # One of several servers has parts of them.
        self._variables = {n: Variable(a, n) for n, a in server.center.items()}

    def prepare(self, states: Mapping[str, Parts] | None) -> None:
        """Make the state of the variables; that of a snapshot if it is given."""
        variables = list(self._variables.values())
        # One of more servers than variables may have none.
        if not variables:
            return
        if self._flat is not None and self._server.slots is not None:
            self._flat.set_variables(variables, self._server.slots)
        self._inner.initialize(variables)
        if states is not None:
            self._inner._kept_state(variables).set(states)

    def serve(self) -> None:
        """Begin to make updates."""
        self._server.start(self._update, rate=self._shared_rate, answer=self._answer)

    def _update(self, grads: Mapping[str, Array], rate: float | None) -> None:
        """Apply gradients, at the learning rate of the host if given."""
        pairs = [(grad, self._variables[name]) for name, grad in grads.items()]
        if self._flat is not None:
            self._flat.apply(rate, pairs)
            return
        options = self._inner._host_options
        if options is not None and not self._server.in_parts:
            options.use(options.changed())
        self._inner.apply_gradients(pairs)

    def _shared_rate(self) -> float | None:
        """Return the learning rate for all servers; None if each of them finds it.

        Called between two updates: options of the host that have changed are sent now.
        """
        if self._flat is not None:
            return self._flat.rate()
        options = self._inner._host_options
        if options is not None and (changed := options.changed()):
            self._server.ask(list(changed))
        return None

    def _answer(self, question: str | list[Any] | None) -> dict[Key, StatePart]:
        """Return the state of a variable, or of all; or use the host's options."""
        if isinstance(question, list):
            assert self._inner._host_options is not None
            self._inner._host_options.use(question)
            return {}
        variables = self._variables.values()
        wanted = [var for var in variables if question in (None, var.name)]
        found = kept_state(self._inner, wanted) if wanted else {}
        if self._server.rounds:
            found |= {(var.name, _VALUE): (var.name, var.value) for var in wanted}
        return found

    # The root

    def slot(self, var: Variable, name: str) -> Variable | None:
        """Return a copy of a slot; None before the first update."""
        if self._server.in_parts:
            found = _whole(self._server.ask(var.name), var.name, var.value)
            _, updates = found.get((var.name, COUNT), ("", None))
            if (var.name, name) not in found or updates == 0:
                return None
            title, value = found[var.name, name]
            return Variable(value, title, trainable=False)
        if var.name not in self._variables:
            return None
        with self._server.paused():
            slot = self._inner.get_slot(self._variables[var.name], name)
            return None if slot is None else slot.copy()

    def snapshot(self) -> dict[str, Any]:
        """Return copies of the variables, their state and the counts, of one step."""
        with self._server.paused():
            step, tally, values = self._server.state()
            # The slots are copied during the pause, too.
            state = self._state()
            # What the host was sent by other servers may be rounded.
            exact = {name for name, part in state if part == _VALUE}
            values |= {name: state.pop((name, _VALUE)) for name in exact}
            copies = snapshot_of(values, state)
        return {**copies, "global_step": step, "tally": tally.as_lists()}

    def _state(self) -> dict[Key, Any]:
        if self._server.in_parts:
            # One variable at a time: a message with all of it may be too long.
            found = {
                key: value
                for name, array in self._values.items()
                for key, value in _whole(self._server.ask(name), name, array).items()
            }
        else:
            found = kept_state(self._inner, self._variables.values())
        return {key: value for key, (_, value) in found.items()}

    def forget(self) -> None:
        """Drop the state of the variables, after the server is freed."""
        if self._variables:
            self._inner._kept_state(self._variables.values()).forget()

    def free(self) -> None:
        """Move all of it to memory of its own, after the server is freed."""
        if self._flat is not None:
            self._flat.move_slots()
        if not self._server.in_parts:
            for name, var in self._variables.items():
                var._move_to(self._server.center[name])


def kept_state(
    optimizer: Optimizer, variables: Iterable[Variable]
) -> dict[Key, StatePart]:
    """Return the state of variables: of each part, its name and its value."""
    parts = optimizer._kept_state(variables).parts()
    return {key: (var.name, plain(var)) for key, var in parts.items()}


def _whole(
    answers: Sequence[Mapping[Key, StatePart]], variable: str, like: Array
) -> dict[Key, StatePart]:
    """Return the state of a variable of which servers have parts."""
    whole: dict[Key, StatePart] = {}
    for key in dict.fromkeys(key for answer in answers for key in answer):
        if key[0] == variable:
            found = [answer[key] for answer in answers if key in answer]
            name, value = found[0]
            # The only server that has it has all of it, of any shape.
            if len(found) > 1 and not isinstance(value, int):
                value = joined([piece for _, piece in found], like.shape)
            whole[key] = name, value
    return whole
