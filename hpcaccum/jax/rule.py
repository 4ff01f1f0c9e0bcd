"""A rule of optax as the optimizer that updates the center of a server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax

from hpcaccum.dtypes import Array
from hpcaccum.errors import InvalidArgumentError
from hpcaccum.jax.averaging import no_average
from hpcaccum.jax.structure import Structure, is_key, key_data
from hpcaccum.optimizers.base import KeptState, Optimizer
from hpcaccum.optimizers.snapshot import Key, Parts
from hpcaccum.optimizers.variable import Variable


class _Keys:
    """The random keys in a state, of which NumPy and checkpoints have only the data."""

    def __init__(self) -> None:
        # For each leaf of the state, what its key is; None if it is no key.
        self.kinds: list[Any] = []

    def replaced(self, state: Any) -> Any:
        """Return a state with the data of the keys."""
        leaves, nesting = jax.tree_util.tree_flatten(state)
        self.kinds = [jax.random.key_impl(x) if is_key(x) else None for x in leaves]
        data = [key_data(leaf) for leaf in leaves]
        return jax.tree_util.tree_unflatten(nesting, data)

    def restored(self, state: Any) -> Any:
        """Return a state that was `replaced` with its keys."""
        leaves, nesting = jax.tree_util.tree_flatten(state)
        found = [
            leaf if kind is None else jax.random.wrap_key_data(leaf, impl=kind)
            for leaf, kind in zip(leaves, self.kinds, strict=True)
        ]
        return jax.tree_util.tree_unflatten(nesting, found)


class OptaxRule(Optimizer):
    """Updates all variables of a pytree at once, by a rule of optax.

    Each list of variables has a state, a pytree, as the rank that holds the center may
    have variables of its own. In a snapshot, all of it belongs to the first variable.
    It is not `elementwise`: a rule may combine leaves, as in a clipping by their norm.

    Attributes:
        structure: Of the parameters. It has the names of the variables.
        extra: Of the other arguments of the rule's ``update``, which are the gradients
            of the last variables. These variables are not updated.
    """

    def __init__(
        self, rule: Any, structure: Structure, extra: Structure, name: str = "optax"
    ) -> None:
        super().__init__(name)
        if not isinstance(rule, optax.GradientTransformation):
            raise TypeError(
                f"optax_rule must be a GradientTransformation, such as "
                f"optax.adam(1e-3), got {type(rule).__name__}"
            )
        structure.check_threads()
        if extra.names:
            extra.check("extra").check_threads()

        self._rule = rule
        keys, rule = _Keys(), optax.with_extra_args_support(rule)

        def init(params: Any) -> Any:
            return keys.replaced(rule.init(params))

        def update(grads: Any, state: Any, params: Any, more: Any) -> tuple[Any, Any]:
            updates, state = rule.update(grads, keys.restored(state), params, **more)
            return optax.apply_updates(params, updates), keys.replaced(state)

        self.structure, self.extra = structure, extra
        self._init, self._update = jax.jit(init), jax.jit(update)
        self._states: dict[tuple[Variable, ...], Any] = {}
        # An unusable rule raises here, and not in the thread of the server.
        params = jax.tree_util.tree_unflatten(structure.nesting, structure.leaves)
        more = jax.tree_util.tree_unflatten(extra.nesting, extra.leaves)
        try:
            with no_average():
                state = jax.eval_shape(init, params)
                updated, _ = jax.eval_shape(update, params, state, params, more)
            if Structure.of(updated) != structure:
                raise ValueError("its updates and parameters differ in shape")
        except InvalidArgumentError:
            raise
        except Exception as error:
            raise InvalidArgumentError(
                f"hpcaccum.jax: optax_rule cannot update these params on a server, "
                f"which has only params, gradients of the same structure, and the "
                f"arguments that extra= names ({type(error).__name__}: {error})"
            ) from error
        self._kept = Structure.of(state)

    def facts(self) -> dict[str, Any]:
        """Return what must be the same on all ranks, by name."""
        extra = {f"extra {name}": fact for name, fact in self.extra.facts().items()}
        return {**self.structure.facts(), **extra}

    def initialize(self, var_list: Any) -> None:
        """Remember the variables, one for each leaf, and make their state."""
        super().initialize(var_list)
        self._state(tuple(self._variables or ()))

    def _state(self, variables: tuple[Variable, ...]) -> Any:
        """Return the state of variables; made at the first call."""
        if variables not in self._states:
            self._states[variables] = self._init(self._params(variables))
        return self._states[variables]

    def apply_gradients(
        self, grads_and_vars: Any, global_step: Any = None, name: str | None = None
    ) -> None:
        """Update the variables in place; the gradients are not changed."""
        grads, variables = zip(*grads_and_vars, strict=True)
        count = len(self.structure.names)
        params, state = self._update(
            self.structure.pack(grads[:count]),
            self._state(variables),
            self._params(variables),
            self.extra.pack(grads[count:]),
        )
        # An error of the computation is raised here, before anything is changed.
        values = self.structure.flatten("the updated parameters", params)
        for var, value in zip(variables, values, strict=False):
            np.copyto(var.value, value)
        self._states[variables] = state

    def _params(self, variables: Sequence[Variable]) -> Any:
        """Return the parameters, without the variables of extra arguments."""
        count = len(self.structure.names)
        return self.structure.pack(var.value for var in variables[:count])

    def _fragment(self, variables: Sequence[Variable]) -> OptaxRule:
        """Return one for some of the leaves, which are a list."""
        if self.extra.names:
            raise InvalidArgumentError(
                "fragments= needs params without extra= arguments"
            )
        structure = self.structure.part([var.name for var in variables])
        return OptaxRule(self._rule, structure, self.extra, self.get_name())

    def _kept_state(self, var_list: Any) -> KeptState:
        return _KeptByOptax(self, self._given_or_known(var_list))


class _KeptByOptax(KeptState):
    """The state of a rule of optax, all of it as that of the first variable."""

    _optimizer: OptaxRule

    def parts(self) -> dict[Key, Variable]:
        rule = self._optimizer
        leaves = rule._kept.flatten("the state", rule._state(tuple(self.variables)))
        return {
            (self.variables[0].name, name): Variable(_saved(leaf), name, False)
            for name, leaf in zip(rule._kept.names, leaves, strict=True)
        }

    def check(self, snapshot: Any) -> None:
        super().check(snapshot)
        kept = self._optimizer._kept
        found = snapshot["state"].get(self.variables[0].name, {})
        if set(found) != set(kept.names):
            raise InvalidArgumentError(
                f"the snapshot was made with another rule: its state has "
                f"{sorted(found)}, that of this rule {sorted(kept.names)}"
            )
        for name, leaf in zip(kept.names, kept.leaves, strict=True):
            if np.shape(found[name]) != leaf.shape:
                raise InvalidArgumentError(
                    f"{name} of the rule's state has shape {leaf.shape}, in the "
                    f"snapshot {np.shape(found[name])}"
                )

    def set(self, states: Mapping[str, Parts]) -> None:
        parts, kept = states[self.variables[0].name], self._optimizer._kept
        leaves = [np.asarray(parts[name]) for name in kept.names]
        self._optimizer._states[tuple(self.variables)] = kept.pack(leaves)


def _saved(leaf: Array) -> Array:
    """Return a leaf of the state as an array that a Variable can hold."""
    return np.array(leaf, np.uint8 if leaf.dtype == bool else leaf.dtype)
