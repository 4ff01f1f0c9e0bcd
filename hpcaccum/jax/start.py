"""The start of training: the same values on all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from hpcaccum.arguments import rank_number
from hpcaccum.errors import InvalidArgumentError
from hpcaccum.jax.structure import Structure, is_key, key_data
from hpcaccum.mpi import Group, group_of
from hpcaccum.optimizers import Variable, start

if TYPE_CHECKING:
    from mpi4py import MPI as mpi4py_MPI

    from hpcaccum.dtypes import Array

_NAME = "hpcaccum.jax.broadcast"


def broadcast(
    tree: Any, comm: mpi4py_MPI.Comm | Group | None = None, root: int = 0
) -> Any:
    """Return the pytree of one rank on all ranks. Collective.

    For parameters, and states of rules: ``params = broadcast(params)``.

    Args:
        tree: A pytree of arrays and numbers of any dtypes, of the same structure,
            shapes and dtypes on all ranks. Only the values of the root are used.
        comm: Communicator of the ranks; COMM_WORLD by default.
        root: The rank that has the values.

    Returns:
        New arrays, on the devices of those that this rank passed.

    Raises:
        TypeError, InvalidArgumentError, DisagreementError: On every rank, if a leaf is
            no array and no number, ranks pass different structures, shapes, dtypes or
            roots, or `jax.jit` traces the call.
    """
    group = group_of(comm)
    leaves, nesting = jax.tree_util.tree_flatten(tree)

    def check() -> tuple[list[Array], dict[str, Any]]:
        if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            raise InvalidArgumentError("the call cannot be inside of jax.jit")
        structure = Structure.of(tree)
        arrays = [np.array(key_data(leaf), order="C") for leaf in leaves]
        # A number of Python has more bits than what JAX makes of it.
        dtypes = {
            f"bytes of {n}": x.dtype
            for n, x in zip(structure.names, arrays, strict=True)
        }
        rank = rank_number(root, group.size, "root")
        return arrays, {**structure.facts(), **dtypes, "root": rank}

    arrays, _ = group.agree(_NAME, check, lambda checked: checked[1])
    bytes_ = [array.reshape(-1).view(np.uint8) for array in arrays]
    start.broadcast(group, [Variable(each, "a leaf") for each in bytes_], _NAME, root)
    return jax.tree_util.tree_unflatten(nesting, map(_like, leaves, arrays))


def _like(leaf: Any, array: Array) -> Any:
    """Return an array as what a leaf is, and where it is."""
    if is_key(leaf):
        keys = jax.random.wrap_key_data(array, impl=jax.random.key_impl(leaf))
        return jax.device_put(keys, leaf.sharding)
    if isinstance(leaf, jax.Array):
        return jax.device_put(array, leaf.sharding)
    return array if isinstance(leaf, np.ndarray) else type(leaf)(array[()])
