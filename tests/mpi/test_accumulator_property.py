"""Random sequences of operations, each by a random rank, against a plain model."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mpi4py import MPI

import hpcaccum as hpc

from .. import naive
from .acting import MAKERS, Take, at, meet, settle
from .support import together

pytestmark = pytest.mark.any_size


class Model(naive.Accumulator):
    """The naive accumulator, with shapes, and takes that wait in one thread.

    Attributes:
        shape: Of the gradients of the round; None if there is none.
        line: Takes that wait, first come first: (rank, number required).
        served: What those got that wait no more: rank to mean.
    """

    def __init__(self, declared: tuple[int | None, ...] | None) -> None:
        super().__init__()
        self._declared = declared
        self.shape: tuple[int, ...] | None = None
        self.line: deque[tuple[int, int]] = deque()
        self.served: dict[int, np.ndarray] = {}

    def apply(self, gradient: np.ndarray, local_step: int) -> Any:
        """Return what apply_grad returns: (accepted, lag), or the error's type."""
        lag = self.step - local_step
        if lag > 0:
            return (False, lag)
        if not self._fits(gradient.shape):
            return hpc.InvalidArgumentError
        self.apply_grad(gradient, local_step)
        self.shape = gradient.shape
        if self.line and self.count >= self.line[0][1]:
            first, _ = self.line.popleft()
            self.served[first] = self._reduce()
        return (True, lag)

    def take(self, required: int) -> Any:
        """Return what take_grad returns if it need not wait."""
        if required < 1:
            return hpc.InvalidArgumentError
        if self.line or self.count < required:
            return hpc.WaitTimeoutError
        return self._reduce()

    def wait(self, rank: int, required: int) -> None:
        """Take, and wait if too few gradients are present."""
        if self.line or self.count < required:
            self.line.append((rank, required))
        else:
            self.served[rank] = self._reduce()

    def _fits(self, shape: tuple[int, ...]) -> bool:
        if self.shape is not None:
            return shape == self.shape
        return self._declared is None or (
            len(shape) == len(self._declared)
            and all(d in (None, s) for d, s in zip(self._declared, shape, strict=True))
        )

    def _reduce(self) -> np.ndarray:
        # Exact: the gradients are small integers.
        self.shape = None
        return self.take_grad(1)


ranks = st.integers(0, 3)
steps = st.integers(-1, 6)
shapes = st.sampled_from([(2,), (2,), (2,), (3,), (1, 2), ()])
operations = st.one_of(
    st.tuples(st.just("apply"), ranks, shapes, st.none() | steps),
    st.tuples(st.just("apply"), ranks, st.just((2,)), st.none()),
    st.tuples(st.just("slot"), ranks, st.just((2,)), st.none() | steps),
    st.tuples(st.just("take"), ranks, st.integers(0, 4)),
    st.tuples(st.just("take"), ranks, st.just(1)),
    st.tuples(st.just("wait"), ranks, st.integers(1, 4)),
    st.tuples(st.just("step"), ranks, steps),
    st.tuples(st.just("count"), ranks),
)


class Run:
    """Applies random operations to an accumulator and to the model, and compares."""

    def __init__(self, acc: hpc.ConditionalAccumulator, declared: Any) -> None:
        self.acc, self.model = acc, Model(declared)
        self.takes: dict[int, Take] = {}
        self.number = 0

    def apply(self, rank: int, shape: Any, local_step: int | None, slot: bool) -> None:
        self.number += 1
        value = np.full(shape, 2.0 ** (self.number % 40))
        step = self.model.step if local_step is None else local_step

        def act() -> tuple[bool, int]:
            gradient = value
            if slot:
                gradient = self.acc.slot(shape, timeout=0)
                gradient[...] = value
            receipt = self.acc.apply_grad(gradient, step)
            assert receipt.local_step == step
            return receipt.accepted, receipt.lag

        self.compare(self.model.apply(value, step), rank, act)
        self.harvest()

    def take(self, rank: int, required: int) -> None:
        if rank in self.takes:
            return  # a thread of this rank holds its place in the line
        take = self.acc.take_grad
        self.compare(self.model.take(required), rank, take, required, timeout=0)

    def wait(self, rank: int, required: int) -> None:
        if rank not in self.takes:
            self.model.wait(rank, required)
            self.takes[rank] = Take(self.acc, rank, required)
            self.harvest()

    def compare(self, expected: Any, rank: int, do: Any, *args: Any, **kw: Any) -> None:
        if isinstance(expected, type):
            with pytest.raises(expected):
                at(rank, do, *args, **kw)
        else:
            np.testing.assert_array_equal(
                at(rank, do, *args, **kw), expected, strict=True
            )

    def harvest(self) -> None:
        """Compare the takes that are over with those that should be."""
        settle(self.acc)
        for rank, expected in self.model.served.items():
            found = self.takes.pop(rank).result()
            np.testing.assert_array_equal(found, expected, strict=True)
        self.model.served.clear()
        alive = meet(any(t.outcome for t in self.takes.values()))
        assert not any(alive), "a take ended that should wait"

    def check(self) -> None:
        found = at(0, lambda: (self.acc.num_accumulated(), self.acc.global_step))
        assert found == (self.model.count, self.model.step)

    def end(self) -> None:
        while self.takes:
            self.apply(0, self.model.shape or (2,), None, slot=False)
        self.check()


@pytest.mark.parametrize(
    ("storage", "declared"),
    [("slots", (2,)), ("sum", (2,)), ("slots", None), ("sum", (None,))],
)
@settings(max_examples=6)
@given(drawn=st.lists(operations, min_size=5, max_size=30))
@together
def test_accumulator_does_what_the_model_does(storage, declared, drawn):
    options = {} if declared == (2,) else {"capacity": 3}
    acc = MAKERS("float64", declared, storage=storage, **options)
    run = Run(acc, declared)
    try:
        for kind, rank, *rest in drawn:
            rank %= MPI.COMM_WORLD.size
            if kind in ("apply", "slot"):
                run.apply(rank, *rest, slot=kind == "slot")
            elif kind == "step":
                at(rank, acc.set_global_step, *rest)
                run.model.step = rest[0]
            elif kind == "count":
                run.compare(run.model.count, rank, acc.num_accumulated)
            else:
                getattr(run, kind)(rank, *rest)
            run.check()
        run.end()
    finally:
        MAKERS.take_back()
