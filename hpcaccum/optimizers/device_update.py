"""Updates of variables on a device: one launch for all variables of a dtype.

A launch takes microseconds, as long as the update of a megabyte, and a model has
hundreds of small variables. The kernels of kernels/update.cu therefore read addresses
from tables on the device. The tables are kept: of the same variables, only the table of
gradients is copied again, and only if their addresses have changed.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hpcaccum.device import kernels, tables
from hpcaccum.dtypes import accumulation_dtype

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from hpcaccum.optimizers.snapshot import State


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
        memory = _Memory(states)
        self._states = states
        self._wide = [accumulation_dtype(state.variable.dtype) for state in states]
        groups = memory.separate(_by_dtype(states))
        self._groups = [_group(kernel, states, members) for members in groups]
        # No method of this object: a cycle would keep the tables until it is collected.
        self._located: Callable[..., _Located] = functools.lru_cache(tables.RECENT)(
            functools.partial(_locate, memory, self._wide, self._groups)
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


class _Memory:
    """Where the values and slots of variables lie."""

    def __init__(self, states: tuple[State, ...]) -> None:
        values: list[Any] = [state.variable.value for state in states]
        self._places = [(value.data.ptr, value.dtype) for value in values]
        self.sizes = np.array([value.size for value in values])
        slots: list[Any] = [
            slot.value for state in states for slot in state.slots.values()
        ]
        spans = sorted(
            (array.data.ptr, array.data.ptr + array.nbytes)
            for array in [*values, *slots]
            if array.size
        )
        self._low = np.array([low for low, _ in spans], np.uint64)
        # Of this span and of all before it.
        high = np.array([high for _, high in spans], np.uint64)
        self._high = np.maximum.accumulate(high) if len(high) else high
        # Whether variables or slots share memory.
        self._shared = bool((self._low[1:] < self._high[:-1]).any())

    def separate(self, groups: list[list[int]]) -> list[list[int]]:
        """Split groups into single variables, in order, if variables share memory.

        Launches follow each other, blocks of one launch do not.
        """
        if not self._shared:
            return groups
        return [[i] for i in sorted(i for group in groups for i in group)]

    def crossing(self, places: tuple[int, ...], dtypes: tuple[Any, ...]) -> list[int]:
        """Return which gradients share memory with a variable, unless it is their own.

        Blocks that update that variable run at the same time. The gradient of ``x * y``
        by ``y`` is ``x``. A gradient that is its own variable counts, too, if variables
        share memory: an earlier launch may change it.
        """
        begin = np.array(places, np.uint64)
        sizes = self.sizes * [dtype.itemsize for dtype in dtypes]
        last = np.searchsorted(self._low, begin + sizes.astype(np.uint64)) - 1
        suspect = (last >= 0) & (self.sizes > 0)
        suspect &= self._high[last] > begin if len(self._high) else False
        return [
            i
            for i in np.flatnonzero(suspect).tolist()
            if self._shared or (places[i], dtypes[i]) != self._places[i]
        ]


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
    memory: _Memory,
    wide: list[np.dtype[Any]],
    groups: list[_Group],
    places: tuple[int, ...],
    dtypes: tuple[Any, ...],
) -> _Located:
    copied = set(memory.crossing(places, dtypes))
    # A kernel reads no gradient that is wider than its arithmetic.
    copied |= {i for i, dtype in enumerate(dtypes) if dtype.itemsize > wide[i].itemsize}
    if copied:
        return _Located(sorted(copied), [])
    rows = [
        [(places[i], tables.KINDS[dtypes[i]]) for i in group.members]
        for group in groups
    ]
    return _Located([], list(map(tables.upload, rows)))
