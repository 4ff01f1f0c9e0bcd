"""A warning about a rank whose gradients are all dropped."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from hpcaccum.errors import counted

if TYPE_CHECKING:
    from hpcaccum.accumulator import Receipt

logger = logging.getLogger("hpcaccum")

# Gradients that are dropped one after the other before the warning.
_MANY = 20


class DropWatch:
    """Warns, once, when the last gradients of this rank were all dropped.

    Args:
        name: Of the optimizer.
        rank: This rank.
        bound: Which gradients are accepted.
    """

    def __init__(self, name: str, rank: int, bound: str) -> None:
        self._name, self._rank, self._bound = name, rank, bound
        self._dropped, self._warned = 0, False

    def note(self, receipt: Receipt) -> None:
        """Take note of what happened to the next gradient."""
        self._dropped = 0 if receipt else self._dropped + 1
        if self._dropped == _MANY and not self._warned:
            self._warned = True
            late = f"was {counted(receipt.lag, 'update')} late, and {self._bound}"
            logger.warning(
                "%s: the last %d gradients of rank %d were all dropped, so the data of "
                "this rank are not in the model; the last gradient %s",
                self._name,
                _MANY,
                self._rank,
                "was not finite" if receipt.nonfinite else late,
            )
