"""Which methods a trace shows, and under which names."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, NamedTuple

from hpcaccum.accumulator.protocol import AdmissionProtocol
from hpcaccum.accumulator.remote_admission import RemoteAdmission
from hpcaccum.accumulator.row_storage import RowSlots
from hpcaccum.accumulator.storage import Slots, Sums
from hpcaccum.accumulator.taker import Taker
from hpcaccum.deadline import Deadline
from hpcaccum.nodes import NodeParts
from hpcaccum.optimizers.base import Optimizer
from hpcaccum.optimizers.update_rule import Rule
from hpcaccum.reducer import Reducer
from hpcaccum.server.bounded_staleness import BoundedStalenessInbox
from hpcaccum.server.client import Client
from hpcaccum.server.node_update import NodeUpdate
from hpcaccum.server.parameters import Parameters
from hpcaccum.server.part_arrivals import PartArrivals
from hpcaccum.server.server_orders import ServerOrders
from hpcaccum.server.shard_loop import ShardLoop
from hpcaccum.server.update_loop import Loop
from hpcaccum.server.wire_format import WireFormat
from hpcaccum.tracing.recorder import Label
from hpcaccum.tracing.wrappers import blocks, calls, steps, waits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from hpcaccum.accumulator import Receipt
    from hpcaccum.tracing.recorder import Recorder
    from hpcaccum.tracing.wrappers import Describe, Function


class Traced(NamedTuple):
    """One method that is traced.

    Attributes:
        owner, method: The class that defines it, and its name.
        name: Of its spans.
        describe: Returns what is shown with a span.
        wrap: Makes the wrapper; see `wrappers`.
    """

    owner: type
    method: str
    name: str
    describe: Describe | None = None
    wrap: Callable[[Function, Label, Describe | None, Recorder], Function] = calls

    @property
    def label(self) -> Label:
        """The label of its spans."""
        return Label(self.name, f"{self.owner.__name__}.{self.method}")


def _outcome(receipt: Receipt | None) -> Mapping[str, Any]:
    if receipt is None:
        return {}
    return {
        "accepted": receipt.accepted,
        "lag": receipt.lag,
        "step": receipt.global_step,
    }


def _step(args: tuple[Any, ...], _: Any) -> Mapping[str, Any]:
    """Return the first argument, a step."""
    return {"step": args[1]}


def _receiver(args: tuple[Any, ...], _: Any) -> Mapping[str, Any]:
    """Return the first argument, the rank of an agent."""
    return {"to": args[1]}


def _call_number(args: tuple[Any, ...], _: Any) -> Mapping[str, Any]:
    """Return how many calls a reducer has completed, the same on all ranks."""
    return {"call": args[0]._calls.track.calls}


# No object keeps one of these methods bound, so a trace may begin at any time.
TABLE = (
    Traced(Optimizer, "compute_gradients", "compute"),
    Traced(
        AdmissionProtocol,
        "admit",
        "admission",
        lambda _, admitted: _outcome(admitted and admitted[0]),
    ),
    Traced(
        RemoteAdmission,
        "admit",
        "admission",
        lambda args, answer: _outcome(answer.receipt(args[1])),
    ),
    Traced(
        BoundedStalenessInbox,
        "_submit",
        "admission",
        lambda _, receipt: _outcome(receipt),
    ),
    Traced(WireFormat, "write_gradients", "copy"),
    Traced(Slots, "write", "copy"),
    Traced(Sums, "write", "copy"),
    Traced(RowSlots, "write", "copy"),
    Traced(Deadline, "wait", "wait", wrap=waits),
    Traced(Deadline, "block", "wait", wrap=blocks),
    Traced(Taker, "take", "take"),
    Traced(BoundedStalenessInbox, "next", "take", _step),
    Traced(Loop, "_make_in_turn", "update", lambda args, _: {"step": args[2].step + 1}),
    Traced(ShardLoop, "_make", "update"),
    Traced(NodeUpdate, "_work", "update"),
    Traced(Rule, "apply_gradients", "update"),
    Traced(NodeParts, "sending", "send", _receiver, steps),
    Traced(Parameters, "_send_snapshot", "send", _receiver, steps),
    Traced(
        ServerOrders,
        "_send_to",
        "send",
        lambda args, _: {"to": args[0]._line.leaders[args[1]]},
        steps,
    ),
    Traced(NodeParts, "collecting", "receive", wrap=steps),
    Traced(Parameters, "_receive", "receive", wrap=steps),
    Traced(PartArrivals, "_receive", "receive", _step, steps),
    Traced(Client, "pull", "pull", lambda _, step: {"step": step}),
    Traced(Reducer, "reduce", "reduce", _call_number),
    Traced(Reducer, "start", "reduce", lambda args, _: {"array": args[1]}),
)


@contextlib.contextmanager
def installed(recorder: Recorder) -> Iterator[None]:
    """Record the calls of all traced methods during the block."""
    with contextlib.ExitStack() as undo:
        for row in TABLE:
            original = vars(row.owner)[row.method]
            wrapper = row.wrap(original, row.label, row.describe, recorder)
            undo.callback(setattr, row.owner, row.method, original)
            setattr(row.owner, row.method, wrapper)
        yield
