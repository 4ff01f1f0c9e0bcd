"""The reduction of gradients in a shard group, whose ranks may leave."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from hpcaccum.accumulator import Tally
from hpcaccum.arguments import converted
from hpcaccum.device import cupy, is_device
from hpcaccum.dtypes import float_dtype
from hpcaccum.errors import InvalidArgumentError
from hpcaccum.layout import Layout
from hpcaccum.reducer import Interruption, Reducer, sum_rows
from hpcaccum.row_sums import Rows

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from hpcaccum.dtypes import Array
    from hpcaccum.mpi import Group
    from hpcaccum.optimizers.variable import Variable

# Why ranks interrupt a reduction.
_LEAVES, _SKIPS = "leaves", "skips"

# What the reducer adds for a gradient of rows: it finds ranks that have none.
MARK = np.zeros(1, np.float32)


def layout_of(variables: Iterable[Variable]) -> Layout:
    """Return the layout of gradients; of the rows of a sparse variable, a `MARK`."""
    return Layout.of({v.name: MARK if v.sparse else v.value for v in variables})


def device_sums(variables: Sequence[Variable]) -> dict[str, Array]:
    """Return memory for the results of variables on a device; nothing for others."""
    values = {var.name: var.value for var in variables}
    if not is_device(variables[0].value):
        return {}
    layout = Layout.of(values)
    return layout.views(cupy().zeros(layout.size, layout.dtype))


def check_wire_dtype(wire_dtype: Any) -> str | None:
    """Return the name of a dtype in which gradients may travel; None for their own.

    Raises:
        TypeError, InvalidArgumentError: If it is not a dtype of floats.
    """
    return None if wire_dtype is None else str(float_dtype(wire_dtype, "wire_dtype"))


class ShardReducer:
    """Reduces the gradients of the ranks of a group that have not left. Collective.

    A rank that leaves, or whose gradients shall not be used, interrupts a reduction.
    The others learn it there, and repeat the reduction without it; after a rank has
    left, with a new reducer.

    Args:
        group: The ranks.
        layout: Of the gradients; see `layout_of`.
        name: For messages.
        options: Those of a `Reducer`, by name; rows travel in their own dtype.

    Attributes:
        reducer: That of the ranks that have not left. When this rank has, the last one.
        present: The ranks of the group that have not left.
        step: Number of updates so far.
        computed: How many gradients this rank has computed, if the user counts them.
            Ranks that throw away different numbers of them are out of step.
        left: Whether this rank has left.
    """

    def __init__(
        self,
        group: Group,
        layout: Layout,
        name: str,
        options: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self._group, self._layout, self._name = group, layout, name
        self._options = options
        self.begin(0, None)
        self.present, self.left = list(range(group.size)), False
        self._current = group
        # Of the next reduction; and the ranks whose gradients the last one used.
        self._started: set[str] = set()
        self._used: list[int] = []
        self._waited = 0.0
        self.reducer = self._make()

    def _make(self) -> Reducer:
        return Reducer(self._layout, self._current, self._name, **self._options)

    def begin(self, step: int, tally: Tally | None) -> None:
        """Set the number of earlier updates, and their counts."""
        self.step, self.computed, self._earlier = step, 0, tally
        self._accepted = [0] * self._group.size
        self._nonfinite = [0] * self._group.size

    def check_present(self) -> None:
        """Raise InvalidArgumentError if this rank has left."""
        if self.left:
            raise InvalidArgumentError(
                f"{self._name}: rank {self._group.rank} has left and can apply no more "
                f"gradients"
            )

    def start(self, name: str, grad: Array | None) -> None:
        """Begin a reduction with one of its gradients; see `Reducer.start`.

        Raises:
            InvalidArgumentError: If this rank has left, or as `Reducer.start`.
        """
        self.check_present()
        self.reducer.start(name, grad)
        self._started.add(name)

    def fail(self, error: Exception) -> NoReturn:
        """Raise an error on every rank, in the place of a reduction. Collective."""
        self.check_present()
        self._started.clear()
        self.reducer.fail(error)

    def reduce(
        self,
        grads: Mapping[str, Array | Rows],
        out: Mapping[str, Array] | None,
        parts: int | None,
        *,
        skips: bool = False,
    ) -> Mapping[str, Array | Rows] | None:
        """Return the sums or means of the gradients. Collective.

        Args:
            grads: By name, also those that were started.
            out: Arrays to which the results are copied, too, by name; or None.
            parts: The number by which the gradients have been divided, so that their
                sum is the mean over so many ranks; 0 for sums. None if the mean is
                made here.
            skips: Whether this rank's gradients are not used.

        Returns:
            The results; None if all ranks skip, so that there is no update.

        Raises:
            InvalidArgumentError: If this rank has left.
            Exception: As `Reducer.reduce`; the number of updates is the same.
        """
        self.check_present()
        rows = {name: each for name, each in grads.items() if isinstance(each, Rows)}
        arrays: Mapping[str, Any] = {**grads, **dict.fromkeys(rows, MARK)}
        sums = self._reduce_arrays(arrays, out, parts, skips)
        if sums is None or not rows:
            return sums
        divided_by = 1 if parts is None else parts
        return {**sums, **self._reduce_rows(rows, divided_by, skips)}

    def _reduce_arrays(
        self,
        grads: Mapping[str, Array],
        out: Mapping[str, Array] | None,
        parts: int | None,
        skips: bool,
    ) -> Mapping[str, Any] | None:
        """Return the results, and set the ranks whose gradients they have."""
        kind, step = "MEAN" if parts is None else "SUM", self.computed
        rest = {name: g for name, g in grads.items() if name not in self._started}
        self._started.clear()
        self._used = self.present
        try:
            if skips:
                self.reducer.interrupt(_SKIPS)
            sums = self.reducer.reduce(rest, out=out, step=step, reduction_type=kind)
            return _mean(sums, len(self._used), parts or 0, out)
        except Interruption as found:
            self._used = self._continue(found.notes)
            if not self._used:
                return None
            if skips:
                grads = {name: np.zeros_like(grad) for name, grad in grads.items()}
            sums = self.reducer.reduce(grads, out=out, step=step, reduction_type="SUM")
            divided_by = 1 if parts is None else parts
            return _mean(sums, len(self._used), divided_by, out)

    def _reduce_rows(
        self, rows: Mapping[str, Rows], parts: int, skips: bool
    ) -> dict[str, Rows]:
        """Return the sums or means of rows; see `_mean`."""
        if skips:
            rows = {name: Rows(*(part[:0] for part in rows[name])) for name in rows}
        sums = sum_rows(self._current, rows, f"{self._name}: exchange of rows")
        values = {name: sums[name].values for name in sums}
        means = _mean(values, len(self._used), parts, None)
        return {name: sums[name]._replace(values=means[name]) for name in sums}

    def count(self) -> None:
        """Count an update with the results of the last `reduce`."""
        for rank in self._used:
            self._accepted[rank] += 1
        self.step += 1

    def leave(self) -> None:
        """Leave, at the next reduction of the other ranks. Collective.

        A second call has no effect.

        Raises:
            Exception: As `Reducer.reduce`; this rank is still present.
        """
        if self.left:
            return
        try:
            self.reducer.interrupt(_LEAVES)
        except Interruption as found:
            self._continue(found.notes)

    def _continue(self, notes: list[Any]) -> list[int]:
        """Return the ranks whose gradients are used, after an interruption. Collective.

        Goes on without the ranks that leave, and counts those that skip.
        """
        by_note: dict[Any, list[int]] = {_LEAVES: [], _SKIPS: [], None: []}
        for place, note in enumerate(notes):
            by_note[note].append(place)
        used, skip = ([self.present[p] for p in by_note[n]] for n in (None, _SKIPS))
        for rank in skip:
            self._nonfinite[rank] += 1
        if gone := by_note[_LEAVES]:
            self._go_on_without(gone)
        return used

    def _go_on_without(self, gone: Sequence[int]) -> None:
        """Make a group and a reducer of the other ranks. Collective."""
        old = self._current
        stay = [place for place in range(old.size) if place not in gone]
        new = old.split([places for places in (stay, gone) if places])
        self._free_reducer()
        self.left = old.rank in gone
        self.present = [self.present[place] for place in stay]
        if self.left:
            new.close()
            return
        self._current = new
        self.reducer = self._make()

    def _free_reducer(self) -> None:
        self._waited += self.reducer.waited
        self.reducer.free()
        if self._current is not self._group:
            self._current.close()

    @property
    def waited(self) -> float:
        """Seconds that this rank has spent in reductions."""
        return self._waited + (0.0 if self.reducer.freed else self.reducer.waited)

    def tally(self) -> Tally:
        """Return how many gradients of each rank were part of an update."""
        accepted, none = tuple(self._accepted), (0,) * self._group.size
        lags = {0: sum(accepted)} if any(accepted) else {}
        own = Tally(accepted, none, lags, none, tuple(self._nonfinite))
        return own + self._earlier if self._earlier else own

    def counts(self) -> dict[str, Any]:
        """Return what a snapshot contains of it; see `counts_of`."""
        return {"global_step": self.step, "tally": self.tally().as_lists()}

    def finish(self) -> int | None:
        """Free the reducer. Collective, of all ranks of the group.

        Returns:
            The rank whose variables are those of the last update, if ranks have left;
            else None.
        """
        if not self.left:
            self._free_reducer()
        if len(self.present) == self._group.size:
            return None
        state = self.step, self._accepted, self._nonfinite
        states = self._group.allgather(state, self._name)
        newest = max(range(self._group.size), key=lambda rank: states[rank][0])
        self.step, self._accepted, self._nonfinite = states[newest]
        return newest


def _mean(
    sums: Mapping[str, Array],
    ranks: int,
    parts: int,
    out: Mapping[str, Array] | None,
) -> Mapping[str, Array]:
    """Return the means over so many ranks.

    Args:
        sums: Of gradients that have been divided by ``parts``.
        ranks: The number of gradients in each sum.
        parts: 0 if the sums shall not be divided.
        out: Arrays that have the sums, and get the means; or None.
    """
    if parts in (0, ranks):
        return sums
    divisor = ranks / parts
    means = {name: total / total.dtype.type(divisor) for name, total in sums.items()}
    for name, array in (out or {}).items():
        array[...] = converted(means[name], array.dtype)
    return means
