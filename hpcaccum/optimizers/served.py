"""Variables with a server of their own, as a rank sees them.

An optimizer has one such group of variables or, if it pushes in fragments, several. A
fragment then has all that a whole optimizer has on a server: admission, step counter,
center, slots, and a part on each of several servers. So each fragment keeps the
promises of a whole optimizer, whatever the others do, and its pushes and pulls carry
only its own variables.

With one server of all variables, a push of some would have to send all, or the server
and its agents would need to know fragments; and a rank that is late could push one
fragment into the round of another.
"""

from __future__ import annotations

import contextlib
import itertools
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcaccum.device import to_host
from hpcaccum.optimizers.center import Center, flat_rule
from hpcaccum.optimizers.start import broadcast
from hpcaccum.server import ParameterServer, ServerSetup

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from hpcaccum.accumulator import Receipt
    from hpcaccum.dtypes import Array
    from hpcaccum.mpi import Group
    from hpcaccum.optimizers.base import Optimizer
    from hpcaccum.optimizers.snapshot import Parts
    from hpcaccum.optimizers.variable import Variable
    from hpcaccum.server import MakeInbox, ServerOptions


class Served:
    """Variables with a server of their own, whose center ``outer`` updates. Collective.

    ``counts`` are the step, and maybe the tally, that it begins with; ``others`` are
    the earlier fragments. For the other arguments see `ParameterServer`.

    Attributes:
        values: Arrays of the variables of this rank, by name.
        server: Of these variables.
        center: What this rank has of their center.
        step: That of this rank's variables.
        useful: The first step that is worth waiting for.
    """

    def __init__(
        self,
        group: Group,
        variables: Sequence[Variable],
        outer: Optimizer,
        make_inbox: MakeInbox,
        place: ServerOptions,
        what: str,
        capacities: Mapping[str, int],
        counts: Mapping[str, Any],
        others: Sequence[Served],
    ) -> None:
        self._group, flat = group, flat_rule(outer)
        self.values = {var.name: var.value for var in variables}
        self.step, self.useful = -1, 0
        setup = ServerSetup(
            group,
            self.values,
            make_inbox,
            place,
            what,
            rule=flat,
            finish=self.pull_all,
            elementwise=outer.elementwise,
            capacities=capacities,
            **counts,
        )
        self.server = ParameterServer(setup)
        for other in others:
            other.server.leave_with(self.server)
        self.center = Center(outer, flat, self.server, self.values)

    def start(self, call: str, states: Mapping[str, Parts] | None) -> None:
        """Begin to serve, maybe with states of the root's; pull. Collective."""
        if states:
            states = {name: states[name] for name in self.values}
        parts = self.server.divide(states)
        self._group.agree(call, lambda: self.center.prepare(parts), lambda _: {})
        if self.server.is_server:
            self.center.serve()
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
        self.useful = receipt.global_step + 1 if receipt else self.server.step
        self.pull()
        if not receipt:
            self.useful = self.server.useful(receipt.global_step)


def fragments_of(variables: Sequence[Variable], count: int) -> list[list[Variable]]:
    """Divide variables, in their order, into groups of about the same number of bytes.

    Each has at least one variable.
    """
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
    """Set the center and all variables to those of one rank. Collective.

    Their servers have been suspended. Each rank calls ``before`` with whether its
    variables are assigned to all.
    """
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
