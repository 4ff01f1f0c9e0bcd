"""The reduction of gradients in a shard group, whose ranks may leave; its layouts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from types import MappingProxyType
from typing import Any, NoReturn, TypeVar

import numpy as np

from hpcaccum import metrics
from hpcaccum.accumulator import Tally
from hpcaccum.arguments import converted
from hpcaccum.dtypes import Array, accumulation_dtype
from hpcaccum.errors import (
    NO_MORE_DATA,
    BrokenObjectError,
    DisagreementError,
    InvalidArgumentError,
)
from hpcaccum.layout import Layout
from hpcaccum.mpi import Group, Objects
from hpcaccum.optimizers.variable import Variable
from hpcaccum.reducer import Interruption, Reducer
from hpcaccum.rows import RowExchange, RowFormat, Rows, columns, weighted

T = TypeVar("T")

# Why ranks interrupt a reduction.
_LEAVES, _SKIPS, _RENEWS = "leaves", "skips", "renews"
# The weight of what a rank contributes whose gradient is not used: as good as none.
_NO_WEIGHT = float(np.finfo(np.float32).tiny)
# What messages call the steps of the reducer.
_COMPUTED = "number of calls of compute_gradients"


class ShardReducer:
    """Reduces the gradients of the ranks of a group that have not left. Collective.

    A rank that leaves, or whose gradients shall not be used, interrupts a reduction,
    which the others repeat without it; after a rank has left, with a new reducer. A
    rank that has started other gradients than it gives has all repeat the reduction
    with those.

    ``options`` are those of a `Reducer`; ``rows`` has the formats of gradients that are
    rows, which travel in their own dtype.

    Attributes:
        reducer: That of the ranks that have not left. When this rank has, the last one.
        present: The ranks of the group that have not left, and were not lost at the
            last reduction.
        computed: Calls of `compute_gradients` that this rank has begun, if the user
            counts them. If ranks differ, that is an error on all of them, after which
            they count from 0.
        facts: Numbers that must be the same on all ranks in the next updates, by name.
        rates: The learning rates of the next update, one for each group of variables,
            which must be the same on all ranks; None is not known.
        started: Names of the gradients that were started for the next reduction.
        stale: Whether gradients have been started that shall not be used. Reset by the
            next reduction, which begins anew.
    """

    def __init__(
        self,
        group: Group,
        layout: Layout,
        name: str,
        options: Mapping[str, Any] = MappingProxyType({}),
        rows: Mapping[str, RowFormat] = MappingProxyType({}),
    ) -> None:
        self._group, self._layout, self._name = group, layout, name
        self._options, self._formats = options, rows
        self.rates: Sequence[float | None] = ()
        self.facts: Mapping[str, float] = {}
        self.begin(0, None)
        self.present, self.left = list(range(group.size)), False
        # Those that have not left, in a group of their own.
        self._current, self._members = group, self.present
        self.started: set[str] = set()
        self.stale = False
        # The ranks whose gradients the last reduction used.
        self._used: list[int] = []
        self._waited = 0.0
        self._make()

    def _make(self) -> None:
        """Make what reduces the gradients of the ranks that are present. Collective."""
        group, name = self._current, self._name
        self.started.clear()
        self.reducer = Reducer(self._layout, group, name, **self._options)
        self.reducer.advise(NO_MORE_DATA)
        self._rows: RowExchange | None = None
        # What the reducer compares.
        self._compared: tuple[float | None, ...] | None = None
        if self._formats:
            shapes, dtype = self._layout.shapes, self._layout.dtype
            marks = {each: np.zeros(shapes[each], dtype) for each in self._formats}
            self._rows = RowExchange(group, self._formats, marks, name)

    def begin(self, step: int, tally: Tally | None) -> None:
        """Set the number of earlier updates, and their counts."""
        self.step, self.computed, self._earlier = step, 0, tally
        # Whether this rank is in an update, or an exception has ended one.
        self._broken = False
        # The gradients that no rank had at the last interruption.
        self._lacking = frozenset[str]()
        self._accepted = [0] * self._group.size
        self._nonfinite = [0] * self._group.size

    def renew(self, what: str) -> None:
        """Make a new reducer, if an exception has ended a call. Collective."""
        if any(self._group.allgather(self._is_broken(), what)):
            self._free_reducer()
            self._make()

    def _is_broken(self) -> bool:
        rows = self._rows is not None and self._rows.broken
        return self._broken or self.reducer.broken or rows

    def check_usable(self) -> None:
        """Raise BrokenObjectError if an exception has ended a call of this rank."""
        if self._is_broken():
            raise BrokenObjectError(
                f"{self._name}: an exception has ended an update of this rank, whose "
                f"variables may differ from those of other ranks; restore a snapshot"
            )

    def check_present(self) -> None:
        """Raise InvalidArgumentError if this rank has left."""
        if self.left:
            raise InvalidArgumentError(
                f"{self._name}: rank {self._group.rank} has left and can apply no more "
                f"gradients"
            )

    def start(self, name: str, grad: Array, weight: float = 1.0) -> None:
        """Begin a reduction with one of its gradients; see `Reducer.start`."""
        self.check_present()
        # Those who start gradients have them in memory of another library.
        self.reducer.copies_all = True
        self.reducer.start(name, grad, weight=weight)
        self.started.add(name)

    def fail(self, error: Exception) -> NoReturn:
        """Raise an error on every rank, in the place of a reduction. Collective."""
        self.check_present()
        self.started.clear()
        self.stale = False
        self.reducer.fail(error)

    def reduce(
        self,
        grads: Mapping[str, Array | Rows],
        out: Mapping[str, Array] | None,
        parts: int | None,
        *,
        skips: bool = False,
        lacks: frozenset[str] = frozenset(),
        weight: float = 1.0,
    ) -> Mapping[str, Array | Rows] | None:
        """Return the means, if ``parts`` is None, or sums; None if all ranks skip.

        Collective. Of 0 parts, sums remain; of another number, by which the gradients
        are divided already, they become means. After their use, call `updated`.
        """
        self.check_present()
        self.check_usable()
        self._broken = True
        rest = {name: g for name, g in grads.items() if name not in self.started}
        stale = self.stale or not self.started <= grads.keys()
        stale |= lacks != self._lacking
        self.started.clear()
        self.stale = False
        self._used = self.present
        try:
            if skips:
                self._call(self.reducer.interrupt, (_SKIPS, lacks))
            if stale:
                self._call(self.reducer.interrupt, (_RENEWS, lacks))
            return self._reduce_once(rest, out, parts, weight)
        except Interruption as found:
            self._broken = True
            self._used = self._continue(found.notes)
            sums = None
            if self._used:
                if skips:
                    grads = {name: _nothing_of(grad) for name, grad in grads.items()}
                    weight = _NO_WEIGHT
                parts = 1 if parts is None else parts
                sums = self._reduce_once(grads, out, parts, weight)
            self._broken = sums is not None
            return sums

    def _reduce_once(
        self,
        grads: Mapping[str, Array | Rows],
        out: Mapping[str, Array] | None,
        parts: int | None,
        weight: float,
    ) -> Mapping[str, Array | Rows] | None:
        """Return the sums or means; None if all ranks that were to be used are lost."""
        if self._lacking:
            grads = {n: each for n, each in grads.items() if n not in self._lacking}
            out = {n: out[n] for n in out if n not in self._lacking} if out else out
        rows = {name: each for name, each in grads.items() if isinstance(each, Rows)}
        arrays: Mapping[str, Any] = grads
        if rows:
            arrays = {**grads, **self._offer(rows, weight)}
        self._compare()
        try:
            sums = self._call(
                self.reducer.reduce,
                arrays,
                out=out,
                step=self.computed,
                reduction_type="MEAN" if parts is None else "SUM",
                weight=weight,
            )
        except DisagreementError:
            self.computed, self._lacking = 0, frozenset()
            raise
        if len(counted := self.reducer.counted) < len(self._members):
            self.present = [self._members[place] for place in counted]
            self._used = [rank for rank in self._used if rank in self.present]
            if not self._used:
                return None
        if not rows:
            return _mean(sums, self.reducer.total_weight, parts, out)
        numbers = {name: sums[name] for name in rows}
        means = {name: sums[name] for name in sums if name not in rows}
        means = dict(_mean(means, self.reducer.total_weight, parts, out))
        return {**means, **self._collect(numbers, 1 if parts is None else parts)}

    def _call(self, call: Callable[..., T], *args: Any, **options: Any) -> T:
        """Call what reduces. All ranks raise its errors and go on, or it is broken."""
        self._broken = False
        result = call(*args, **options)
        self._broken = True
        return result

    def _compare(self) -> None:
        """Set what the next reduction compares, beside arrays and `computed`."""
        facts = (*self.rates, *self.facts.values())
        if facts == self._compared:
            return
        several = len(self.rates) > 1
        known: dict[str, float] = {
            "learning rate" + f" of parameter group {number}" * several: rate
            for number, rate in enumerate(self.rates)
            if rate is not None
        }
        self.reducer.compare({**known, **self.facts}, _COMPUTED)
        self._compared = facts

    def _offer(self, rows: Mapping[str, Rows], weight: float) -> Mapping[str, Array]:
        """Make rows ready for the other ranks; return what is reduced of them."""
        assert self._rows is not None
        try:
            # No warning: an overflow shows up as inf in the result.
            with np.errstate(all="ignore"):
                rows = {name: weighted(each, weight) for name, each in rows.items()}
            return self._rows.offer(rows, self.reducer.calls + 1)
        except MemoryError as error:
            self._broken = False
            self.reducer.fail(error)

    def _collect(self, numbers: Mapping[str, Array], parts: int) -> dict[str, Rows]:
        """Return the sums or means of rows; see `_mean`."""
        assert self._rows is not None
        sums = self._call(self._rows.collect, numbers, self.reducer.calls)
        values = {name: each.values for name, each in sums.items()}
        means = _mean(values, self.reducer.total_weight, parts, None)
        return {name: sums[name]._replace(values=means[name]) for name in sums}

    def count(self) -> None:
        """Count an update with the results of the last `reduce`."""
        for rank in self._used:
            self._accepted[rank] += 1
        self.step += 1

    def updated(self) -> None:
        """Note that the results of the last `reduce` are used."""
        self._broken = False
        metrics.note(self)

    def _metrics(self) -> metrics.Metrics:
        return metrics.Metrics(self._name, self.step, self.waited, self.tally())

    def leave(self) -> None:
        """Leave, at the next reduction of the other ranks. Collective."""
        if self.left:
            return
        self.check_usable()
        try:
            self.reducer.interrupt((_LEAVES, frozenset()))
        except Interruption as found:
            self._continue(found.notes)

    def _continue(self, notes: Mapping[int, Any]) -> list[int]:
        """Go on without the ranks that leave or skip; return the others. Collective."""
        lacks: dict[int, frozenset[str]] = {}
        gone: list[int] = []
        for place, note in notes.items():
            why, lacking = note or (None, self._lacking)
            if why == _LEAVES:
                gone.append(place)
            elif why == _SKIPS:
                self._nonfinite[self._members[place]] += 1
            else:
                lacks[self._members[place]] = lacking
        self._lacking = frozenset()
        if lacks:
            self._lacking = frozenset.intersection(*lacks.values())
        if gone:
            self._go_on_without(gone)
        return list(lacks)

    def _go_on_without(self, gone: Sequence[int]) -> None:
        """Make a group and a reducer of the other ranks. Collective."""
        old = self._current
        stay = [place for place in range(old.size) if place not in gone]
        new = old.split([places for places in (stay, gone) if places])
        self._free_reducer()
        self.left = old.rank in gone
        self._members = self.present = [self._members[place] for place in stay]
        if self.left:
            Objects.of(new).close()
            return
        self._current = new
        self._make()

    def _free_reducer(self) -> None:
        self._waited += self.reducer.waited
        self.reducer.free()
        if self._rows is not None:
            self._rows.free()
            self._rows = None
        if self._current is not self._group:
            Objects.of(self._current).close()

    @property
    def waited(self) -> float:
        """Seconds that this rank has spent in reductions."""
        return self._waited + (0.0 if self.reducer.freed else self.reducer.waited)

    def tally(self) -> Tally:
        """Return how many gradients of each rank were part of an update."""
        accepted, none = tuple(self._accepted), (0,) * self._group.size
        lags = {0: sum(accepted)} if any(accepted) else {}
        own = Tally(accepted, none, lags, tuple(self._nonfinite))
        return own + self._earlier if self._earlier else own

    def counts(self) -> dict[str, Any]:
        """Return what a snapshot contains of it; see `counts_of`."""
        return {"global_step": self.step, "tally": self.tally().as_lists()}

    def finish(self) -> int | None:
        """Free the reducer; if ranks have left, return a rank with the last variables.

        Collective, of all ranks of the group.
        """
        if not self.left:
            self._free_reducer()
        if len(self._members) == self._group.size:
            return None
        # The variables of a broken one may differ from those of all others.
        state = (not self._is_broken(), self.step), self._accepted, self._nonfinite
        states = self._group.allgather(state, self._name)
        newest = max(range(self._group.size), key=lambda rank: states[rank][0])
        (_, self.step), self._accepted, self._nonfinite = states[newest]
        return newest


def _nothing_of(grad: Array | Rows) -> Array | Rows:
    """Return what a rank contributes whose gradient is not used."""
    if isinstance(grad, Rows):
        return Rows(*(part[:0] for part in grad))
    return np.zeros_like(grad)


def _mean(
    sums: Mapping[str, Array],
    weight: float,
    parts: int | None,
    out: Mapping[str, Array] | None,
) -> Mapping[str, Array]:
    """Return the means over ranks with so much weight; see `ShardReducer.reduce`."""
    if parts in (None, 0, weight):
        return sums
    divisor = weight / parts
    means = {name: total / total.dtype.type(divisor) for name, total in sums.items()}
    for name, array in (out or {}).items():
        array[...] = converted(means[name], array.dtype)
    return means


# What is reduced


def layout_of(variables: Iterable[Variable], ranks: int) -> Layout:
    """Return the layout of what is reduced; of rows, their numbers (`RowExchange`)."""
    rows = row_formats(variables)
    marks = {
        name: np.zeros((ranks, columns(each)), np.float32)
        for name, each in rows.items()
    }
    return Layout.of({v.name: marks.get(v.name, v.value) for v in variables})


def row_formats(variables: Iterable[Variable]) -> dict[str, RowFormat]:
    """Return the formats of the gradients of sparse variables, by name."""
    return {
        var.name: RowFormat(
            len(var.value), prod(var.shape[1:]), accumulation_dtype(var.dtype)
        )
        for var in variables
        if var.sparse
    }
