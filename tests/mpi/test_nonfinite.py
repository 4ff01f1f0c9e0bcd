"""Gradients that are not finite, and ranks whose gradients are all dropped."""

import logging

import numpy as np
import pytest

import hpcaccum as hpc
from hpcaccum import Reduction

from ..common import check_error
from .acting import at, meet
from .training import ONE_SIDED, WRAPPERS, diloco, gives, raised, started, variable

pytestmark = pytest.mark.any_size

NAN = np.array([1.0, np.nan, 1.0])


@pytest.fixture(params=WRAPPERS)
def make(request, comm):
    return lambda w, **options: WRAPPERS[request.param](
        hpc.SGD(1.0), [w], comm, **options
    )


def test_drop_leaves_the_variables_alone_and_counts(make, rank, size):
    w = variable(np.zeros(3))
    with started(make(w, on_nonfinite="drop"), [w]) as opt:
        dropped = [opt.minimize(gives(NAN)) for _ in range(2)]
        meet()
        assert opt.global_step == 0
        assert opt.statistics().nonfinite == (2,) * size
        assert not opt.center(w).any()
        assert not w.value.any()
        meet()
        good = [opt.minimize(gives(np.ones(3))) for _ in range(2)]
        opt.leave()

    assert [(r.accepted, r.reason, r.global_step) for r in dropped] == [
        (False, "nonfinite", 0)
    ] * 2
    assert {r.reason for r in good} <= {"", "stale"}
    tally = opt.statistics()
    assert tally.nonfinite == (2,) * size
    assert tally.dropped[rank] == sum(not r for r in good)
    assert tally.accepted[rank] == sum(r.accepted and r.sent for r in good)


def test_accept_is_the_default(make):
    w = variable(np.zeros(3))
    with make(w) as opt:
        receipts = [opt.minimize(gives(NAN), var_list=[w]) for _ in range(2)]
        opt.leave()

    assert any(meet(any(receipts)))
    assert np.isnan(w.value).tolist() == [False, True, False]


def test_raise_names_the_variable_and_sends_nothing(make, rank):
    w = variable(np.zeros(3))
    with started(make(w, on_nonfinite="raise", name="mine"), [w]) as opt:
        error = raised(opt.minimize, gives(np.array([1, np.inf, 1])))
        meet()
        assert opt.global_step == 0
        assert not opt.center(w).any()
        opt.leave()

    check_error(error, "mine: the gradient of 'w' has a NaN or an infinity")


EXCHANGED = [
    # In float32; tests/device/test_finite.py has more.
    (np.array([1e300, 1.0]), False),
    (np.array([-1e300, 1.0]), False),
    (hpc.IndexedSlices(np.float32([3e38, 3e38]), [0, 0]), False),
    (hpc.IndexedSlices(np.float32([3e38, 3e38, -3e38]), [0, 1, 0]), True),
    (np.array([1 << 62, 1]), True),
    (np.array([3e38, -3e38]), True),
]


def test_what_is_exchanged_must_be_finite(make):
    for number, (gradient, finite) in enumerate(EXCHANGED):
        sparse = number % 2 == 1
        w = hpc.Variable(np.zeros(2, "f4"), "w", sparse=sparse)
        if sparse and isinstance(gradient, np.ndarray):
            gradient = hpc.IndexedSlices(gradient, [0, 1])
        with make(w, on_nonfinite="drop") as opt:
            receipt = opt.minimize(gives(gradient), var_list=[w])
            opt.leave()
        assert (receipt.reason != "nonfinite") == finite, gradient


def test_an_overflow_in_the_dtype_of_the_variable_is_no_warning(make):
    w = hpc.Variable(np.zeros(2, "f4"), "w")
    with make(w) as opt:
        for _ in range(2):
            opt.minimize(gives(np.array([1e300, 0])), var_list=[w])
        opt.leave()

    assert w.value.tolist() == [-np.inf, 0]


def halves(opt, loss, weight):
    """Make a step by two calls, of which the first one divides."""
    return opt.apply_gradients(opt.compute_gradients(loss), weight=weight)


def minimize(opt, loss, weight):
    return opt.minimize(loss, weight=weight)


@pytest.mark.parametrize("step", [minimize, halves])
@pytest.mark.parametrize("reduction", [Reduction.MEAN, Reduction.SUM])
@pytest.mark.parametrize("weights", [(1, 1, 1, 1), (4, 2, 0.5, 8)])
def test_the_mean_is_over_the_finite_gradients(
    comm, rank, size, reduction, step, weights
):
    w, weight = variable(np.zeros(3)), weights[rank]
    with hpc.CrossShardOptimizer(
        hpc.SGD(1.0), reduction, comm=comm, on_nonfinite="drop"
    ) as opt:
        opt.initialize([w])
        grad = NAN if rank == 0 else np.full(3, rank + 1.0)
        receipt = step(opt, gives(grad), weight)
        after = w.value.copy()
        again = step(opt, gives(np.ones(3)), weight)

    expected = sum((r + 1) * weights[r] for r in range(1, size))
    every = sum(weights[:size])
    if reduction == Reduction.MEAN:
        expected, every = expected / max(every - weights[0], 1), 1
    np.testing.assert_allclose(after, -expected, rtol=1e-12)
    np.testing.assert_allclose(w.value, after - every, rtol=1e-12)
    assert receipt.reason == ("nonfinite" if rank == 0 else "")
    assert again.global_step == (1 if size > 1 else 0)
    assert opt.global_step == (2 if size > 1 else 1)
    assert opt.statistics().accepted == (1,) + (2,) * (size - 1)
    assert opt.statistics().nonfinite == (1,) + (0,) * (size - 1)


@pytest.mark.ranks(min=3)
def test_one_leaves_while_another_is_not_finite(comm, rank, size):
    w = variable(np.zeros(3))
    with hpc.CrossShardOptimizer(hpc.SGD(1.0), comm=comm, on_nonfinite="drop") as opt:
        opt.initialize([w])
        if rank == 0:
            opt.leave()
        else:
            opt.minimize(gives(NAN if rank == 1 else np.full(3, rank + 1.0)))
            opt.leave()

    others = range(2, size)
    expected = sum(r + 1 for r in others) / len(others)
    np.testing.assert_allclose(w.value, -expected, rtol=1e-12)
    assert opt.statistics().nonfinite == (0, 1) + (0,) * (size - 2)


def test_a_dropped_gradient_does_not_count_in_the_period(comm, rank, size):
    w = variable(np.zeros(3))
    with ONE_SIDED["AGN"](hpc.SGD(1.0), [w], comm, on_nonfinite="drop") as opt:
        opt.initialize()
        sent = [
            opt.minimize(gives(np.full(3, grad))).sent for grad in (1.0, np.nan, 3.0)
        ]
        opt.leave()

    # The receipt of a dropped gradient is final.
    assert sent == [False, True, True]
    np.testing.assert_allclose(w.value, -2.0 * size, rtol=1e-12)


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("make", [ONE_SIDED["AGN"], diloco])
def test_a_dropped_gradient_keeps_the_local_steps(comm, make):
    w = variable(np.zeros(3))
    made = make(hpc.SGD(1.0), [w], comm, on_nonfinite="drop")
    with started(made, [w]) as opt:
        at(-1, opt.minimize, gives(np.ones(3)))
        for _ in range(2):
            at(0, opt.minimize, gives(np.full(3, 5.0)))  # the second pushes
        at(-1, opt.minimize, gives(NAN))
        assert at(-1, w.value.tolist) == [-1.0] * 3


@pytest.mark.parametrize(
    ("staleness", "option", "why"),
    [
        (-1, "accept", "0 updates late, and staleness=-1 is the largest lag accepted"),
        (9, "drop", "not finite"),
    ],
)
def test_a_rank_that_contributes_nothing_is_warned_once(
    comm, rank, caplog, staleness, option, why
):
    w, options = variable(np.zeros(3)), {"comm": comm, "on_nonfinite": option}
    opt = hpc.DropStaleGradientOptimizer(hpc.SGD(1.0), staleness, **options)
    with caplog.at_level(logging.WARNING), opt:
        for number in range(45):
            assert not opt.minimize(gives(NAN), var_list=[w])
            assert len(caplog.messages) == (number >= 19)

    assert caplog.messages == [
        f"DropStaleGradient: the last 20 gradients of rank {rank} were all dropped, so "
        f"the data of this rank are not in the model; the last gradient was {why}"
    ]


@pytest.mark.ranks(min=2)
def test_a_rank_that_is_always_late_is_warned(comm, rank, size, caplog):
    w, late = variable(), rank == size - 1
    opt = hpc.SyncReplicasOptimizer(hpc.SGD(0.5), size - 1, comm=comm)
    with caplog.at_level(logging.WARNING), opt:
        opt.initialize([w])
        for _ in range(20):
            # All begin with the same parameters; the others are done first.
            pairs = opt.compute_gradients(gives(1.0))
            meet()
            assert late or opt.apply_gradients(pairs)
            meet()
            assert not late or not opt.apply_gradients(pairs)
            meet()
    text = "1 update late, and a gradient of an earlier step is not accepted"
    assert (text in caplog.text) == late
