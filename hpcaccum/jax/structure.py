"""Pytrees as named arrays."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from hpcaccum.dtypes import FLOATS, Array
from hpcaccum.errors import InvalidArgumentError
from hpcaccum.optimizers import Variable


@dataclass(frozen=True)
class Structure:
    """How the leaves of a pytree are nested, and their shapes and dtypes.

    Attributes:
        names: The path to each leaf, such as ``['dense']['kernel']``.
        leaves: Shape and dtype of each.
        nesting: The PyTreeDef.
    """

    names: tuple[str, ...]
    leaves: tuple[Any, ...]
    nesting: Any

    @classmethod
    def of(cls, tree: Any) -> Structure:
        """Return the structure of a pytree, of arrays or of what `jax.jit` traces."""
        try:
            shapes = jax.eval_shape(_same, tree)
        except TypeError:
            kinds = {type(leaf).__name__ for leaf in jax.tree_util.tree_leaves(tree)}
            raise TypeError(
                f"the leaves of a pytree must be arrays or numbers, got "
                f"{', '.join(sorted(kinds))}"
            ) from None
        found, nesting = jax.tree_util.tree_flatten_with_path(shapes)
        return cls(
            # The path to a single array is empty.
            tuple(jax.tree_util.keystr(path) or "array" for path, _ in found),
            tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for _, leaf in found),
            nesting,
        )

    def part(self, names: Sequence[str]) -> Structure:
        """Return the structure of a list of some of the leaves."""
        leaves = dict(zip(self.names, self.leaves, strict=True))
        return Structure.of([leaves[name] for name in names])

    def check(self, what: str) -> Structure:
        """Return it, if all leaves can be exchanged."""
        if not self.names:
            raise InvalidArgumentError(f"{what} has no arrays: {self.nesting}")
        for name, leaf in zip(self.names, self.leaves, strict=True):
            if leaf.dtype not in FLOATS:
                raise InvalidArgumentError(
                    f"leaf {name} of {what} must be of "
                    f"{', '.join(map(str, FLOATS))}, got {leaf.dtype}"
                )
        return self

    def check_threads(self) -> None:
        """Raise InvalidArgumentError if other threads lack arrays of these dtypes."""
        # `with jax.enable_x64(True)` enables float64 in this thread only.
        with ThreadPoolExecutor(1) as thread:
            wide = thread.submit(lambda: jax.config.jax_enable_x64).result()
        if not wide and any(leaf.dtype == np.float64 for leaf in self.leaves):
            raise InvalidArgumentError(
                "float64 must be enabled in all threads, as the server has its own: "
                "jax.config.update('jax_enable_x64', True)"
            )

    def facts(self) -> dict[str, Any]:
        """Return what must be the same on all ranks, by name."""
        leaves = zip(self.names, self.leaves, strict=True)
        facts = {f"leaf {name}": leaf for name, leaf in leaves}
        return {**facts, "structure": self.nesting}

    def flatten(self, what: str, tree: Any) -> list[Array]:
        """Return the leaves of a pytree with the same nesting, not copied."""
        leaves, nesting = jax.tree_util.tree_flatten(tree)
        if nesting != self.nesting:
            raise InvalidArgumentError(
                f"{what} must have the structure {self.nesting}, got {nesting}"
            )
        return [np.asarray(leaf) for leaf in leaves]

    def variables(self, tree: Any, prefix: str = "") -> list[Variable]:
        """Return a variable for each leaf of a pytree, with a copy of its value."""
        arrays = self.flatten("the pytree", tree)
        leaves = zip(arrays, self.leaves, self.names, strict=True)
        return [
            Variable(np.array(array, leaf.dtype), prefix + name)
            for array, leaf, name in leaves
        ]

    def pack(self, arrays: Iterable[Array]) -> Any:
        """Return a pytree of JAX arrays that share no memory with these."""
        leaves = zip(arrays, self.leaves, strict=True)
        copies = [_copied(array, leaf.dtype) for array, leaf in leaves]
        return jax.tree_util.tree_unflatten(self.nesting, copies)


def is_key(leaf: Any) -> bool:
    """Whether a leaf is an array of random keys."""
    is_array = isinstance(leaf, jax.Array)
    return is_array and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def key_data(leaf: Any) -> Any:
    """Return the data of random keys; another leaf as it is."""
    return jax.random.key_data(leaf) if is_key(leaf) else leaf


def _same(tree: Any) -> Any:
    return tree


def _copied(array: Array, dtype: np.dtype[Any]) -> Any:
    # JAX uses the memory of a NumPy array as its own, or copies it later: it gets a new
    # array.
    with np.errstate(all="ignore"):
        return jax.device_put(np.array(array, dtype))
