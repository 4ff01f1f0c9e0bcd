"""A parameter server with a simple update, for tests of the server itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from hpcaccum import Group, Receipt
from hpcaccum.accumulator import Batch
from hpcaccum.deadline import Deadline
from hpcaccum.server import (
    BoundedStalenessInbox,
    Inbox,
    ParameterServer,
    QuorumInbox,
)

from .support import WAIT


def start(
    comm: Any,
    *,
    host: int = 0,
    dedicated: bool = False,
    quorum: int | None = None,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    updates: bool = True,
    initial: Mapping[str, np.ndarray[Any, Any]] | None = None,
    **options: Any,
) -> ParameterServer:
    """Return a server whose updates subtract gradients, or means of a quorum.

    By default, rank r fills its variables with r, so the center starts with ``host``.
    """
    group = Group.of(comm)
    workers = group.size - dedicated

    def inbox(size: int, dtype: Any, rows: Any) -> Inbox:
        if quorum is None:
            return BoundedStalenessInbox(group, host, size, dtype, workers=workers)
        return QuorumInbox(group, host, size, dtype, quorum, workers, rows)

    filled = {
        name: np.full(shape, float(group.rank))
        for name, shape in (shapes or {"w": (3,)}).items()
    }
    server = ParameterServer(
        group,
        host,
        initial or filled,
        inbox,
        dedicated=dedicated,
        what="server",
        **options,
    )

    def update(
        grads: dict[str, np.ndarray[Any, Any]], rate: float | None = None
    ) -> Callable[[], None]:
        def change() -> None:
            for name, grad in grads.items():
                server.center[name] -= grad

        return change

    if server.is_root and updates:
        server.start(update)
    return server


def train(server: ParameterServer, values: Iterable[float]) -> list[Receipt]:
    """Push gradients, wait for the update of each; return the receipts."""
    receipts, out = [], np.zeros(3)
    for value in values:
        receipts.append(server.push({"w": np.full(3, float(value))}, server.step))
        server.pull({"w": out}, at_least=receipts[-1].global_step + 1)
    return receipts


def next_total(
    inbox: Inbox, step: int, size: int, timeout: float = WAIT
) -> np.ndarray[Any, Any]:
    """Return the sum or mean that makes the next step; zeros if there is none."""
    deadline, total = Deadline(timeout, "test"), np.zeros(size)

    def use(batch: Batch) -> None:
        if batch.places:
            batch.total(total, deadline, threads=1)

    inbox.next(step, deadline, use)
    return total


def read(server: ParameterServer, name: str) -> np.ndarray[Any, Any]:
    """Return a copy of one array of the center."""
    return server.read([name])[0]
