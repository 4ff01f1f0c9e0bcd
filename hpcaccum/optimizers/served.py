"""Variables with a server of their own, as a rank sees them.

An optimizer has one such group of variables or, if it pushes in fragments, several. A
fragment then has all that a whole optimizer has on a server: admission, step counter,
center, slots, and a part on each of several servers. So each fragment keeps the
promises of a whole optimizer, whatever the others do, and its pushes and pulls carry
only its own variables. With one server of all variables, a rank that is late could push
one fragment into the round of another.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from hpcaccum.accumulator import Receipt
from hpcaccum.device import to_host
from hpcaccum.dtypes import Array
from hpcaccum.mpi import Group
from hpcaccum.optimizers.base import Optimizer
from hpcaccum.optimizers.snapshot import COUNT, Key, Parts, plain, snapshot_of
from hpcaccum.optimizers.start import broadcast
from hpcaccum.optimizers.update_rule import FlatRule, Rule
from hpcaccum.optimizers.variable import Variable
from hpcaccum.server import ParameterServer, ServerSetup, joined

# What one of several servers has of a variable itself, beside its state.
_VALUE = "?value"

# A part of the state of a variable: its name and its value.
StatePart = tuple[str, Any]


class Served:
    """Variables with a server of their own, whose center ``outer`` updates. Collective.

    Attributes:
        values: Arrays of the variables of this rank, by name.
        server: Of these variables.
        step: That of this rank's variables.
        useful: The first step that is worth waiting for.
    """

    def __init__(self, setup: ServerSetup, outer: Optimizer) -> None:
        self._group, self._outer, self.values = setup.group, outer, setup.initial
        # The updates of ``outer`` as those of a vector: the server may call it instead.
        # An optimizer of the user may be elementwise, but only a `Rule` updates pieces.
        self._flat: FlatRule | None = None
        if isinstance(outer, Rule) and outer.elementwise:
            self._flat = FlatRule(outer)
        self.step, self.useful = -1, 0
        self.server = ParameterServer(setup, self._flat, self.pull_all)
        # On a server only; each of several has parts of the variables.
        self._center = {n: Variable(a, n) for n, a in self.server.center.items()}

    def start(self, call: str, states: Mapping[str, Parts] | None) -> None:
        """Begin to serve, maybe with states of the root's; pull. Collective."""
        if states:
            states = {name: states[name] for name in self.values}
        parts = self.server.divide(states)
        self._group.agree(call, lambda: self._prepare(parts), lambda _: {})
        if self.server.is_server:
            self.server.start(self._update, rate=self._shared_rate, answer=self._answer)
        self.pull()

    def pull(self, into: Mapping[str, Array] | None = None) -> None:
        """Copy the newest center to this rank's variables, or to those in ``into``."""
        self.step = self.server.pull(
            self.values if into is None else into,
            at_least=self.useful,
            known=self.step,
        )

    def pull_all(self) -> None:
        """Set this rank's variables to the center's, whatever their step."""
        self.step = self.server.pull(self.values, at_least=self.server.step)

    def after(self, receipt: Receipt) -> None:
        """Pull after a push: wait for its update, or do not wait if it was dropped."""
        if receipt.accepted:
            self.useful = receipt.global_step + 1
            self.pull()
            return
        self.useful = self.server.step
        self.pull()
        self.useful = self.server.inbox.useful(receipt.global_step)

    # The center: its updates, on servers

    def _prepare(self, states: Mapping[str, Parts] | None) -> None:
        """Make the state of the center; that of a snapshot if it is given."""
        variables = list(self._center.values())
        # One of more servers than variables may have none.
        if not variables:
            return
        if self._flat is not None and self.server.slots is not None:
            self._flat.set_variables(variables, self.server.slots)
        self._outer.initialize(variables)
        if states is not None:
            self._outer._kept_state(variables).set(states)

    def _update(self, grads: Mapping[str, Array], rate: float | None) -> None:
        """Apply gradients, at the learning rate of the host if given."""
        pairs = [(grad, self._center[name]) for name, grad in grads.items()]
        if self._flat is not None:
            self._flat.apply(rate, pairs)
            return
        if not self.server.in_parts and (changed := self._outer._changed_options()):
            self._outer._use_options(changed)
        self._outer.apply_gradients(pairs)

    def _shared_rate(self) -> float | None:
        """Return the learning rate for all servers; None if each of them finds it."""
        # Called between two updates: options that have changed are sent now.
        if self._flat is not None:
            return self._flat.rate()
        if changed := self._outer._changed_options():
            self.server.ask(list(changed))
        return None

    def _answer(self, question: str | list[Any] | None) -> dict[Key, StatePart]:
        """Return the state of a variable, or of all; or use the host's options."""
        if isinstance(question, list):
            self._outer._use_options(question)
            return {}
        variables = self._center.values()
        wanted = [var for var in variables if question in (None, var.name)]
        found = kept_state(self._outer, wanted) if wanted else {}
        if self.server.rounds:
            found |= {(var.name, _VALUE): (var.name, var.value) for var in wanted}
        return found

    # Its state, on the root

    def slot(self, var: Variable, name: str) -> Variable | None:
        """Return a copy of a slot; None before the first update."""
        if self.server.in_parts:
            found = _whole(self.server.ask(var.name), var.name, var.value)
            _, updates = found.get((var.name, COUNT), ("", None))
            if (var.name, name) not in found or updates == 0:
                return None
            title, value = found[var.name, name]
            return Variable(value, title, trainable=False)
        if var.name not in self._center:
            return None
        with self.server.paused():
            slot = self._outer.get_slot(self._center[var.name], name)
            return None if slot is None else slot.copy()

    def snapshot(self) -> dict[str, Any]:
        """Return copies of the variables, their state and the counts, of one step."""
        with self.server.paused():
            step, tally, values = self.server.state()
            # The slots are copied during the pause, too.
            state = self._state()
            # What the host was sent by other servers may be rounded.
            exact = {name for name, part in state if part == _VALUE}
            values |= {name: state.pop((name, _VALUE)) for name in exact}
            copies = snapshot_of(values, state)
        return {**copies, "global_step": step, "tally": tally.as_lists()}

    def _state(self) -> dict[Key, Any]:
        if self.server.in_parts:
            # One variable at a time: a message with all of it may be too long.
            found = {
                key: value
                for name, array in self.values.items()
                for key, value in _whole(self.server.ask(name), name, array).items()
            }
        else:
            found = kept_state(self._outer, self._center.values())
        return {key: value for key, (_, value) in found.items()}

    def forget(self) -> None:
        """Drop the state of the center, after the server is freed."""
        if self._center:
            self._outer._kept_state(self._center.values()).forget()

    def keep(self) -> None:
        """Move the center to memory of its own, after the server is freed."""
        if self._flat is not None:
            self._flat.move_slots()
        if not self.server.in_parts:
            for name, var in self._center.items():
                var._move_to(self.server.center[name])


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


def fragments_of(variables: Sequence[Variable], count: int) -> list[list[Variable]]:
    """Divide variables, in their order, into groups of similar sizes, none empty."""
    ends = list(itertools.accumulate(var.value.nbytes for var in variables))
    bounds = [0]
    for number in range(1, count):
        wanted = ends[-1] * number / count
        allowed = range(bounds[-1] + 1, len(variables) - count + number + 1)
        bounds.append(min(allowed, key=lambda end: abs(ends[end - 1] - wanted)))
    bounds.append(len(variables))
    return [list(variables[slice(*pair)]) for pair in itertools.pairwise(bounds)]


def divided(counts: Mapping[str, Any], number: int) -> list[dict[str, Any]]:
    """Return the counts with which fragments begin: together, those of a snapshot."""
    step = counts.get("step", 0)
    first = {**counts, "step": -(-step // number)}
    steps = [(step + number - 1 - each) // number for each in range(1, number)]
    return [first, *({"step": each} for each in steps)]


@contextlib.contextmanager
def paused(served: Sequence[Served]) -> Iterator[int]:
    """Suspend the updates of all variables; give the block their number so far."""
    with contextlib.ExitStack() as stack:
        yield sum([stack.enter_context(each.server.paused()) for each in served])


def read(served: Sequence[Served], names: Sequence[str]) -> list[Array]:
    """Return copies of the center of some variables, those of a server of one step."""
    found: dict[str, Array] = {}
    for each in served:
        if own := [name for name in names if name in each.values]:
            found |= zip(own, each.server.read(own), strict=True)
    return [found[name] for name in names]


def assign(
    group: Group,
    served: Sequence[Served],
    variables: Sequence[Variable],
    what: str,
    before: Callable[[bool], None],
) -> None:
    """Set the center, of suspended servers, and all variables to those of one rank."""
    servers = [each.server for each in served]
    source = servers[0].source

    def check() -> None:
        for server in servers:
            server.check_not_paused("assign()")
        before(group.rank == source)

    try:
        group.agree(what, check, lambda _: {})
    except Exception:
        for server in servers:
            server.come_back()
        group.allgather(None, what)
        raise
    broadcast(group, variables, what, source)
    for each in served:
        own = each.values if each.server.is_server else {}
        values = {name: np.array(to_host(value)) for name, value in own.items()}
        # This node may have older ones.
        each.useful = each.step = each.server.assign(values)
