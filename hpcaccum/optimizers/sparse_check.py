"""Whether an optimizer with a parameter server accepts its sparse variables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hpcaccum.errors import InvalidArgumentError
from hpcaccum.optimizers.start import signature

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpcaccum.optimizers.base import Optimizer
    from hpcaccum.optimizers.variable import Variable


def check_sparse(
    what: str,
    variables: Sequence[Variable],
    servers: Sequence[int] | None,
    inner: Optimizer,
) -> None:
    """Raise InvalidArgumentError if a variable is sparse and cannot be."""
    needs: str | None
    if servers is not None and len(servers) > 1:
        needs = f"one server, got servers={list(servers)}"
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
    """Return the maximum number of rows of a rank in one update, by sparse variable."""
    return {
        var.name: min(gradients * var.capacity, var.shape[0])
        for var in variables
        if var.sparse
    }
