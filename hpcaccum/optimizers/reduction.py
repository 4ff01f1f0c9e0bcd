"""How a `CrossShardOptimizer` combines the gradients of all ranks."""

from __future__ import annotations

from hpcaccum.errors import InvalidArgumentError


class Reduction:
    """How the gradients of all ranks are combined; the values are TensorFlow's."""

    MEAN = "weighted_mean"
    SUM = "weighted_sum"


def check_reduction(reduction: str) -> str:
    """Return a reduction; raise InvalidArgumentError unless it is one."""
    if reduction not in (Reduction.MEAN, Reduction.SUM):
        raise InvalidArgumentError(
            f"reduction must be Reduction.MEAN or Reduction.SUM, got {reduction!r}"
        )
    return reduction
