"""A warning when all gradients of a rank are dropped."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from hpcaccum.errors import counted

if TYPE_CHECKING:
    from hpcaccum.accumulator import Receipt

logger = logging.getLogger("hpcaccum")

# Gradients that are dropped one after the other before a warning.
_MANY = 20


class DropsInARow:
    """Counts the gradients of a rank that were dropped one after the other.

    Args:
        name: Of the optimizer.
        rank: The rank.
    """

    def __init__(self, name: str, rank: int) -> None:
        self._name, self._rank = name, rank
        self._dropped, self._warned = 0, False

    def note(self, receipt: Receipt, bound: str) -> None:
        """Count a gradient; warn, once, if the last ones were all dropped.

        Args:
            receipt: Of the gradient.
            bound: Which gradients are accepted.
        """
        self._dropped = 0 if receipt else self._dropped + 1
        if self._dropped < _MANY or self._warned:
            return
        self._warned = True
        late = f"was {counted(receipt.lag, 'update')} late, and {bound}"
        logger.warning(
            "%s: the last %d gradients of rank %d were all dropped, so the data of "
            "this rank are not in the model; the last gradient %s",
            self._name,
            _MANY,
            self._rank,
            "was not finite" if receipt.nonfinite else late,
        )
