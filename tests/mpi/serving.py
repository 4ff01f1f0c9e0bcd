"""Takes gradients from an inbox as a server does, for tests of interruptions."""

from __future__ import annotations

from typing import Any

import numpy as np

from hpcaccum.deadline import Deadline

from .support import WAIT


def next_total(inbox: Any, step: int, size: int, timeout: float = WAIT) -> Any:
    """Return the sum or mean that makes the next step; zeros if there is none."""
    deadline, total = Deadline(timeout, "test"), np.zeros(size)

    def use(batch: Any) -> None:
        if batch.places:
            batch.total(total, deadline, threads=1)

    inbox.next(step, deadline, use)
    return total
