"""CrossShardOptimizer: errors of one rank are raised on all ranks."""

import numpy as np
import pytest

import hpcaccum as hpc
from hpcaccum import DisagreementError, InvalidArgumentError

from .training import cross_shard_fixture, gives, raised, variable  # noqa: F401

pytestmark = pytest.mark.any_size


def test_a_bad_global_step_of_minimize_is_an_error_on_all(make, rank, size):
    w, opt = variable(np.zeros(3)), make()
    step = "none" if rank == size - 1 else None
    error = raised(opt.minimize, gives(np.ones(3)), step, [w])
    before = w.value.copy()
    opt.minimize(gives(np.ones(3)))

    assert type(error) is TypeError
    assert "global_step must be" in str(error)
    assert (before == 0).all()
    assert (w.value == -1).all()


@pytest.mark.ranks(min=2)
def test_a_rank_that_throws_a_gradient_away_is_found(make, rank, size):
    w, opt = variable(), make()
    opt.minimize(gives(1.0), var_list=[w])
    opt.compute_gradients(gives(1.0))
    if rank == size - 1:
        opt.compute_gradients(gives(9.0))
    error = raised(opt.apply_gradients, [(9.0 if rank == size - 1 else 1.0, w)])

    assert type(error) is DisagreementError
    assert (
        f"number of calls of compute_gradients must be the same on all {size} ranks: "
        f"rank 0 has 2, rank {size - 1} has 3"
    ) in str(error)
    np.testing.assert_allclose(w.value, -1, rtol=1e-15)
    # All ranks know of it, and go on.
    opt.minimize(gives(1.0))
    np.testing.assert_allclose(w.value, -2, rtol=1e-15)


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("halves", [False, True])
def test_a_learning_rate_of_one_rank_is_found(make, rank, size, halves):
    w, opt = variable(), make()
    opt.minimize(gives(1.0), var_list=[w])
    other = 0.25 if rank == size - 1 else 0.5
    opt.learning_rate = other
    if halves:
        error = raised(opt.apply_gradients, opt.compute_gradients(gives(1.0)))
    else:
        error = raised(opt.minimize, gives(1.0))

    assert type(error) is DisagreementError
    assert (
        f"learning rate must be the same on all {size} ranks: rank 0 has 0.5, "
        f"rank {size - 1} has 0.25"
    ) in str(error)
    np.testing.assert_allclose(w.value, -1, rtol=1e-15)
    opt.learning_rate = 0.5
    opt.minimize(gives(1.0))
    np.testing.assert_allclose(w.value, -1.5, rtol=1e-15)


def test_only_learning_rates_that_are_numbers_are_compared(make, rank):
    w, calls = variable(), []

    def rate():
        calls.append(rank)
        return 0.5

    opt = make()
    opt.learning_rate = rate
    for _ in range(2):
        opt.minimize(gives(1.0), var_list=[w])
    # The comparison would call it once more.
    assert (w.value, len(calls)) == (-1, 2)
    opt.learning_rate = np.float32(0.25)
    opt.minimize(gives(1.0))
    assert w.value == -1.25


# Arguments


def test_bad_groups_are_refused_by_all(comm, rank, size):
    everybody = list(range(size))
    bad = [
        [[]],
        [everybody, [0]],
        [[0, *everybody]],
        [everybody[1:], []],
        [[size, *everybody[1:]]],
        [[0.5, *everybody[1:]]],
        [tuple(everybody)],
        np.array([everybody]),
        7,
    ]
    if size > 2:
        bad += [[everybody[:1], everybody[1:]], [everybody[:-1]]]
    for groups in bad:
        mine = groups if rank == size - 1 else [everybody]
        error = raised(
            hpc.CrossShardOptimizer, hpc.SGD(1), group_assignment=mine, comm=comm
        )
        assert type(error) is InvalidArgumentError, groups
        assert "group" in str(error)
