"""Updates of variables on a device: one launch for all variables of a dtype.

A launch takes microseconds, as long as the update of a megabyte, and a model has
hundreds of small variables. The kernels of kernels/update.cu therefore read addresses
from tables on the device. The tables are kept: of the same variables, only the table of
gradients is copied again, and only if their addresses have changed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from hpcaccum.device import kernels, tables
from hpcaccum.dtypes import Array, accumulation_dtype
from hpcaccum.optimizers.snapshot import State
from hpcaccum.overlap import bounds, sharing


class _Group(NamedTuple):
    """Variables of one dtype, which one launch updates."""

    kernel: Any
    # Their indices in the plan.
    members: list[int]
    # The dtype of the arithmetic and of the slots.
    wide: np.dtype[Any]
    # On the device; a row of 4 int64 for each: address of the value, of slot 0 and
    # slot 1, number of elements.
    variables: Any
    chunks: tables.Chunks

    def launch(
        self,
        gradients: Any,
        steps: list[int],
        of_step: Mapping[int, tuple[float, ...]],
    ) -> None:
        rate, *more = of_step[steps[self.members[0]]]
        table = None
        if len(of_step) > 1:
            rates = [of_step[steps[i]][0] for i in self.members]
            table = tables.upload(rates, self.wide) if len(set(rates)) > 1 else None
        work = self.variables, gradients, *self.chunks, table
        numbers = map(self.wide.type, (rate, *more))
        grid = (self.chunks.blocks,)
        self.kernel(grid, (kernels.THREADS,), (*work, *numbers))


class Plan:
    """The tables for one set of variables on one stream."""

    def __init__(self, kernel: str, states: tuple[State, ...]) -> None:
        self._states = states
        self._wide = [accumulation_dtype(state.variable.dtype) for state in states]
        values = [state.variable.value for state in states]
        slots = [each.value for state in states for each in state.slots.values()]
        memory, groups = [*values, *slots], _by_dtype(states)
        shared = sharing(dict(enumerate(memory))) is not None
        spans = sorted(span for span in map(bounds, memory) if span[0] < span[1])
        low, high = np.array(spans or [(0, 0)], np.uint64).T
        # The highest end so far, as a span may contain later ones.
        places = low, np.maximum.accumulate(high)
        if shared:
            # Launches follow each other, blocks of one launch do not.
            groups = [[i] for i in sorted(i for group in groups for i in group)]
        self._groups = [_group(kernel, states, members) for members in groups]
        # No method of this object: a cycle would keep the tables until it is collected.
        self._located: Callable[..., _Located] = functools.lru_cache(tables.RECENT)(
            functools.partial(_locate, values, places, shared, self._wide, self._groups)
        )

    def update(
        self, grads: Sequence[Any], numbers: Callable[[int], tuple[float, ...]]
    ) -> None:
        """Count an update of all variables, and queue it on the current stream."""
        located = self._located(*_places(grads))
        if located.copied:
            grads = list(grads)
            for i in located.copied:
                grads[i] = grads[i].astype(self._wide[i])
            located = self._located(*_places(grads))
        steps = [state.count() for state in self._states]
        of_step = {step: numbers(step) for step in set(steps)}
        for group, gradients in zip(self._groups, located.tables, strict=True):
            group.launch(gradients, steps, of_step)


class _Located(NamedTuple):
    """Gradients at certain addresses."""

    # Indices of those that must be copied; if any, there are no tables.
    copied: list[int]
    # On the device, for each group; a row of 2 int64 for each variable: address and
    # kind of dtype.
    tables: list[Any]


def _by_dtype(states: tuple[State, ...]) -> list[list[int]]:
    """Return the indices of variables that have elements, for each dtype."""
    groups: dict[np.dtype[Any], list[int]] = {}
    for i, state in enumerate(states):
        if state.variable.value.size:
            groups.setdefault(state.variable.dtype, []).append(i)
    return list(groups.values())


def _group(kernel: str, states: tuple[State, ...], members: list[int]) -> _Group:
    dtype = states[members[0]].variable.dtype
    return _Group(
        kernels.of_dtype(kernel, dtype),
        members,
        accumulation_dtype(dtype),
        tables.upload([_row(states[i]) for i in members]),
        tables.chunked([states[i].variable.value.size for i in members]),
    )


def _row(state: State) -> tuple[int, int, int, int]:
    arrays: list[Any] = [state.variable, *state.slots.values()]
    value, first, second, *_ = *[each.value.data.ptr for each in arrays], 0, 0
    return value, first, second, state.variable.value.size


def _places(grads: Sequence[Any]) -> tuple[tuple[int, ...], tuple[Any, ...]]:
    return tuple([g.data.ptr for g in grads]), tuple([g.dtype for g in grads])


def _locate(
    values: Sequence[Any],
    memory: tuple[Array, Array],
    shared: bool,
    wide: list[np.dtype[Any]],
    groups: list[_Group],
    places: tuple[int, ...],
    dtypes: tuple[Any, ...],
) -> _Located:
    sizes = [v.size * dtype.itemsize for v, dtype in zip(values, dtypes, strict=True)]
    begin, (low, high) = np.array(places, np.uint64), memory
    end = begin + np.array(sizes, np.uint64)
    before = np.searchsorted(low, end) - 1
    crossing = (before >= 0) & (high[before] > begin) & (end > begin)
    # Blocks that update another variable run at the same time: the gradient of `x * y`
    # by `y` is `x`. If variables share memory, an earlier launch may also change a
    # gradient that is its own variable.
    copied = {
        i
        for i in np.flatnonzero(crossing).tolist()
        if shared or (places[i], dtypes[i]) != (values[i].data.ptr, values[i].dtype)
    }
    # A kernel reads no gradient that is wider than its arithmetic.
    copied |= {i for i, dtype in enumerate(dtypes) if dtype.itemsize > wide[i].itemsize}
    if copied:
        return _Located(sorted(copied), [])
    rows = [
        [(places[i], tables.KINDS[dtypes[i]]) for i in group.members]
        for group in groups
    ]
    return _Located([], list(map(tables.upload, rows)))
