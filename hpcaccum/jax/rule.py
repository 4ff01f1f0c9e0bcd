"""A rule of optax as the optimizer that updates the center of a server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import optax

from hpcaccum.errors import InvalidArgumentError
from hpcaccum.jax.averaging import no_average
from hpcaccum.jax.structure import Structure
from hpcaccum.optimizers.base import Optimizer
from hpcaccum.optimizers.variable import Variable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from hpcaccum.dtypes import Array
    from hpcaccum.optimizers.snapshot import Key, Parts


class _Keys:
    """The random keys in a state, of which NumPy and checkpoints have only the data.

    Attributes:
        kinds: Of each leaf of the state, what its key is; None if it is no key.
    """

    def __init__(self) -> None:
        self.kinds: list[Any] = []

    def replaced(self, state: Any) -> Any:
        """Return a state with the data of the keys."""
        leaves, nesting = jax.tree_util.tree_flatten(state)
        self.kinds = [jax.random.key_impl(x) if _is_key(x) else None for x in leaves]
        data = [jax.random.key_data(x) if _is_key(x) else x for x in leaves]
        return jax.tree_util.tree_unflatten(nesting, data)

    def restored(self, state: Any) -> Any:
        """Return a state that was `replaced` with its keys."""
        leaves, nesting = jax.tree_util.tree_flatten(state)
        found = [
            leaf if kind is None else jax.random.wrap_key_data(leaf, impl=kind)
            for leaf, kind in zip(leaves, self.kinds, strict=True)
        ]
        return jax.tree_util.tree_unflatten(nesting, found)


def _is_key(leaf: Any) -> bool:
    is_array = isinstance(leaf, jax.Array)
    return is_array and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


class OptaxRule(Optimizer):
    """Updates all variables of a pytree at once, by a rule of optax.

    The rule's state is a pytree of JAX arrays. Each list of variables has one: the rank
    that holds the center may also have variables of its own. In a snapshot, all of the
    state belongs to the first variable.

    It is not `elementwise`: a rule may combine leaves, such as a clipping by the global
    norm.

    Args:
        rule: A GradientTransformation.
        structure: Of the parameters. It has the names of the variables.
        name: As in `Optimizer`.

    Attributes:
        take: Writes the values that are assigned to this rank's variables.

    Raises:
        TypeError: If ``rule`` is not a GradientTransformation.
        Exception: Any that the rule raises for such parameters.
    """

    __slots__ = ("_init", "_kept", "_states", "_structure", "_update", "take")

    def __init__(self, rule: Any, structure: Structure, name: str = "optax") -> None:
        super().__init__(name)
        if not isinstance(rule, optax.GradientTransformation):
            raise TypeError(
                f"optax_rule must be a GradientTransformation, such as "
                f"optax.adam(1e-3), got {type(rule).__name__}"
            )
        structure.check_threads()

        keys = _Keys()

        def init(params: Any) -> Any:
            return keys.replaced(rule.init(params))

        def update(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
            updates, state = rule.update(grads, keys.restored(state), params)
            return optax.apply_updates(params, updates), keys.replaced(state)

        self._structure = structure
        self._init, self._update = jax.jit(init), jax.jit(update)
        self._states: dict[tuple[Variable, ...], Any] = {}
        self.take: Callable[[], None] | None = None
        # An unusable rule raises here, and not in the thread of the server.
        params = jax.tree_util.tree_unflatten(structure.nesting, structure.leaves)
        with no_average():
            state = jax.eval_shape(init, params)
            jax.eval_shape(update, params, state, params)
        self._kept = Structure.of(state)

    def initialize(self, var_list: Any) -> None:
        """Remember the variables, one for each leaf, and make their state."""
        super().initialize(var_list)
        self._state(tuple(self._variables or ()))

    def _state(self, variables: tuple[Variable, ...]) -> Any:
        """Return the state of variables; made at the first call."""
        if variables not in self._states:
            params = self._structure.pack(var.value for var in variables)
            self._states[variables] = self._init(params)
        return self._states[variables]

    def apply_gradients(
        self, grads_and_vars: Any, global_step: Any = None, name: str | None = None
    ) -> None:
        """Update the variables in place; the gradients are not changed.

        Args:
            grads_and_vars: Pairs (gradient, Variable), one for each leaf, in order.
            global_step: Ignored.
            name: Ignored.
        """
        grads, variables = zip(*grads_and_vars, strict=True)
        params, state = self._update(
            self._structure.pack(grads),
            self._state(variables),
            self._structure.pack(var.value for var in variables),
        )
        # An error of the computation is raised here, before anything is changed.
        values = self._structure.flatten("the updated parameters", params)
        for var, value in zip(variables, values, strict=True):
            np.copyto(var.value, value)
        self._states[variables] = state

    def _take_values(self, is_source: bool) -> None:
        if is_source and self.take is not None:
            self.take()

    # Snapshots

    def _check_snapshot(self, snapshot: Any, variables: list[Variable]) -> None:
        super()._check_snapshot(snapshot, variables)
        found = snapshot["state"].get(variables[0].name, {})
        if set(found) != set(self._kept.names):
            raise InvalidArgumentError(
                f"the snapshot was made with another rule: its state has "
                f"{sorted(found)}, that of this rule {sorted(self._kept.names)}"
            )
        for name, leaf in zip(self._kept.names, self._kept.leaves, strict=True):
            if np.shape(found[name]) != leaf.shape:
                raise InvalidArgumentError(
                    f"{name} of the rule's state has shape {leaf.shape}, in the "
                    f"snapshot {np.shape(found[name])}"
                )

    def _kept_state(self, variables: Iterable[Variable]) -> dict[Key, Variable]:
        all_ = tuple(variables)
        leaves = self._kept.flatten("the state", self._state(all_))
        return {
            (all_[0].name, name): Variable(_saved(leaf), name, trainable=False)
            for name, leaf in zip(self._kept.names, leaves, strict=True)
        }

    def _restore_state(
        self, variables: Sequence[Variable], states: Mapping[str, Parts]
    ) -> None:
        parts = states[variables[0].name]
        leaves = [np.asarray(parts[name]) for name in self._kept.names]
        self._states[tuple(variables)] = self._kept.pack(leaves)


def _saved(leaf: Array) -> Array:
    """Return a leaf of the state as an array that a Variable can hold."""
    return np.array(leaf, np.uint8 if leaf.dtype == bool else leaf.dtype)
