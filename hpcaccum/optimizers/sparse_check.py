"""Whether an optimizer with a parameter server accepts its sparse variables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hpcaccum.errors import InvalidArgumentError
from hpcaccum.optimizers.start import signature

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpcaccum.mpi import Group
    from hpcaccum.optimizers.base import Optimizer
    from hpcaccum.optimizers.variable import Variable


def check_sparse(
    what: str,
    variables: Sequence[Variable],
    group: Group,
    inner: Optimizer,
    sends_gradients: bool,
) -> None:
    """Raise InvalidArgumentError if a variable is sparse and cannot be.

    Args:
        what: Begins the message.
        variables: All variables.
        group: The ranks.
        inner: Makes the updates.
        sends_gradients: Whether each gradient is sent, not sums of several ones.
    """
    needs = None
    if not sends_gradients:
        needs = "an optimizer that sends each gradient, not sums of several"
    elif not group.single_node:
        needs = f"all ranks on one node, they are on {len(group.nodes)}"
    else:
        needs = inner._needs_for_rows()
    for var in variables:
        if var.sparse and needs is not None:
            raise InvalidArgumentError(
                f"{what}: sparse=True of {var.name!r} needs {needs}; make it without "
                f"sparse=True, or use a cross-shard optimizer"
            )


def declared(variables: Sequence[Variable]) -> dict[str, Any]:
    """Return what must be the same on all ranks of an optimizer with a server."""
    return {
        "variables": signature(variables),
        "capacities of sparse variables": capacities(variables),
    }


def capacities(variables: Sequence[Variable], gradients: int = 1) -> dict[str, int]:
    """Return the maximum number of rows of a rank's gradients, by sparse variable.

    Args:
        variables: All variables.
        gradients: Of a rank in one update.
    """
    return {
        var.name: min(gradients * var.capacity, var.shape[0])
        for var in variables
        if var.sparse
    }
