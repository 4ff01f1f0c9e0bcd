"""Refuses to be traced where one program stands for several calls."""

from __future__ import annotations

from typing import Any, NoReturn

import jax

from hpcaccum.errors import InvalidArgumentError


def refuse_mapped(name: str, leaves: list[Any]) -> list[Any]:
    """Return values of which no element and no device has its own."""

    def refuse(*_: Any) -> NoReturn:
        raise InvalidArgumentError(
            f"{name} cannot be called inside of jax.vmap, jax.pmap or jax.shard_map, "
            f"where each element or device would make its own exchange; call it "
            f"outside, in a function that jax.jit compiles, whose arrays may be "
            f"divided among devices"
        )

    if _axes():
        refuse()
    places = [n for n, x in enumerate(leaves) if isinstance(x, jax.core.Tracer)]
    if not places:
        return leaves
    # The only way to know of a vmap of a function that was traced before.
    same = jax.custom_batching.custom_vmap(lambda *values: values)
    same.def_vmap(refuse)
    checked = dict(zip(places, same(*(leaves[n] for n in places)), strict=True))
    return [checked.get(number, leaf) for number, leaf in enumerate(leaves)]


def _axes() -> tuple[Any, ...]:
    """Return the axes of devices, or named ones of elements, of what is traced."""
    found = tuple(jax.sharding.get_abstract_mesh().manual_axes)
    try:
        from jax._src.core import get_axis_env
    except ImportError:
        return found
    # The axes of pmap, which is implemented by shard_map only since JAX 0.8.
    return found + tuple(get_axis_env().axis_sizes)
