"""DropStaleGradientOptimizer: admission by lag, under fixed schedules."""

import numpy as np
import pytest

import hpcaccum as hpc

from .training import computed, gives, meet, turns, variable

pytestmark = pytest.mark.any_size


@pytest.fixture
def make(make_one):
    kind = hpc.DropStaleGradientOptimizer
    return lambda staleness, own, inner=None, **options: make_one(
        kind, inner or hpc.SGD(1), staleness, variables=own, **options
    )


@pytest.mark.parametrize("staleness", [-2, -1, 0, 1, 2])
def test_accepted_if_and_only_if_lag_is_at_most_staleness(make, staleness):
    w = variable()
    opt = make(staleness, [w], lateness="inverse")

    def act(_):
        # All five have the step at which they were computed.
        pairs = opt.compute_gradients(gives(1.0))
        return [opt.apply_gradients(pairs) for _ in range(5)]

    [receipts] = turns([0], act)

    accepted = max(0, staleness + 1)
    assert [bool(r) for r in receipts] == [True] * accepted + [False] * (5 - accepted)
    assert [r.lag for r in receipts] == [min(lag, accepted) for lag in range(5)]
    assert {r.local_step for r in receipts} == {0}
    factors = [1, 1 / 2, 1 / 3][:accepted]
    assert [r.factor for r in receipts[:accepted]] == factors
    assert opt.center(w) == -sum(factors)


@pytest.mark.parametrize(
    ("lag", "staleness"), [(0, 0), (1, 0), (1, 1), (2, 1), (2, 2), (3, 2)]
)
@pytest.mark.ranks(min=2)
def test_lag_is_what_others_did_since_the_compute(make, rank, size, staleness, lag):
    w, v = variable([0.0, 0.0], name="w"), variable(name="v")
    opt, late = make(staleness, [w, v], hpc.Momentum(1, 0.5)), size - 1
    pairs = computed(opt, np.array([8.0, 8.0]), 8.0)
    meet()  # no update before all have computed
    turns([0] * lag, lambda _: opt.minimize(gives(np.zeros(2), 0.0)))
    [receipt] = turns([late], lambda _: opt.apply_gradients(pairs))
    state = [slot.value.tolist() for slot in opt.variables()] if rank == 0 else None

    accepted = lag <= staleness
    assert receipt == hpc.Receipt(accepted, 0, lag)
    assert (opt.center(w) == (-8 if accepted else 0)).all()
    assert opt.center(v) == opt.center(w)[0]
    assert opt.global_step == lag + accepted
    assert opt.stale_counter == (not accepted)
    if rank == 0 and lag:
        assert state == [[8.0, 8.0], 8.0] if accepted else [[0.0, 0.0], 0.0]


def test_no_factor_is_asked_for_during_training(make, size):
    lags = []

    def factor(lag):
        lags.append(lag)
        return np.float32(1)

    opt = make(10**9, [variable()], lateness=factor)
    assert lags == [*range(1001)]
    receipt = opt.minimize(gives(1.0))
    assert (receipt.factor, len(lags)) == (1, 1001)
    assert type(receipt.factor) is float


def test_an_accepted_gradient_is_in_the_variables_on_return(make, rank, size):
    w, step = variable(), hpc.Variable(0, "step")
    # It may be computed with the parameters of the step before: a rank that has just
    # got some from another node does not ask again.
    opt = make(1, [w])

    def act(turn):
        opt.minimize(gives(1.0), step)
        return float(w.value), int(step.value)

    found = turns([*range(size), *range(size)], act)

    assert found == [(-k, k) for k in range(1, 2 * size + 1)]


@pytest.mark.parametrize("staleness", [0, 1, 10**6])
def test_nothing_is_lost_or_counted_twice_whatever_is_dropped(
    make, rank, size, staleness
):
    w = variable()
    opt, calls = make(staleness, [w]), 50
    receipts = [opt.minimize(gives(float(1 << 8 * rank))) for _ in range(calls)]
    everybody, tally = meet(receipts), opt.statistics()
    accepted = [sum(map(bool, receipts)) for receipts in everybody]

    # No two are of one step.
    steps = [each.global_step for of_rank in everybody for each in of_rank if each]
    assert sorted(steps) == list(range(opt.global_step))
    assert -opt.center(w) == sum(n << 8 * r for r, n in enumerate(accepted))
    assert tally.accepted == tuple(accepted)
    assert tally.dropped == tuple(calls - number for number in accepted)
    assert opt.stale_counter == sum(tally.dropped)
    assert sum(tally.lags.values()) == calls * size
    assert staleness < 10**6 or opt.stale_counter == 0


def test_without_compute_the_step_is_that_of_the_variables(make):
    w = variable()
    opt = make(0, [w])
    receipts = turns([0] * 3, lambda _: opt.apply_gradients([(1.0, w)]))

    assert receipts == [hpc.Receipt(True, step, step) for step in range(3)]
