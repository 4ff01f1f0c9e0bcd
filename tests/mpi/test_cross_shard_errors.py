"""CrossShardOptimizer: errors of one rank are raised on all ranks."""

from __future__ import annotations

import numpy as np
import pytest
from mpi4py import MPI

import hpcaccum as hpc
from hpcaccum import (
    DisagreementError,
    InvalidArgumentError,
)

from .training import cross_shard_fixture, gives, raised, variable  # noqa: F401

pytestmark = pytest.mark.any_size

# Errors of one rank


@pytest.mark.parametrize(("which", "initialized"), [("first", True), ("last", False)])
def test_bad_pairs_on_one_rank_are_an_error_on_all(
    make, rank, size, which, initialized
):
    w, opt, ones = variable(np.zeros(3)), make(), np.ones(3)
    if initialized:
        opt.initialize([w])
    failing = 0 if which == "first" else size - 1
    for bad, kind in [
        ([(np.ones(2), w)], InvalidArgumentError),
        ([(np.ones(3, complex), w)], InvalidArgumentError),
        ([(np.ma.ones(3), w)], InvalidArgumentError),
        ([(None, w)], InvalidArgumentError),
        ([], InvalidArgumentError),
        ([(ones, w), (ones, w)], InvalidArgumentError),
        ([(ones, w.value)], TypeError),
        ([ones], TypeError),
        (None, TypeError),
    ]:
        pairs = bad if rank == failing else [(ones, w)]
        error = raised(opt.apply_gradients, pairs)
        assert type(error) is kind, bad
        assert rank == failing or f"rank {failing}: " in str(error)
        assert (w.value == 0).all()
    opt.apply_gradients([(ones, w)])
    assert (w.value == -size).all()


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"wire_dtype": "float64"}, InvalidArgumentError, "narrower than float32"),
        ({"wire_dtype": "int8"}, InvalidArgumentError, "wire_dtype must be one of"),
        ({"wire_dtype": "nonsense"}, TypeError, "wire_dtype must name a float"),
        (
            {"wire_dtype": "float16", "cuda_aware": True},
            InvalidArgumentError,
            "not 'flat'",
        ),
    ],
)
def test_a_wrong_wire_dtype_changes_nothing(comm, rank, options, kind, text):
    w = variable(np.full(3, rank), np.float32)

    def start():
        opt = hpc.CrossShardOptimizer(hpc.SGD(1.0), comm=comm, **options)
        opt.initialize([w])

    error = raised(start)
    assert type(error) is kind
    assert text in str(error)
    assert (w.value == rank).all()


@pytest.mark.parametrize("same_name", [True, False])
def test_a_variable_that_is_not_known_is_an_error_on_all(make, rank, size, same_name):
    w, opt = variable(np.zeros(3)), make()
    opt.initialize([w])
    other = variable(0.0, name="w" if same_name else "other")
    pairs = [(1.0, other)] if rank == size - 1 else [(np.ones(3), w)]
    error = raised(opt.apply_gradients, pairs)

    assert type(error) is InvalidArgumentError
    assert "was initialized without this variable" in str(error)
    assert (w.value == 0).all()


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("whole", [True, False])
def test_ranks_without_the_same_gradients_are_an_error_on_all(make, rank, size, whole):
    every = {variable(np.zeros(2), name=f"{number}"): number for number in range(30)}
    opt, all_of = make(), set(range(30))
    opt.initialize(every)
    for some, others in [
        ({0, 1}, {24}),
        ({5, 6}, {29}),
        ({7}, {8}),
        (all_of, all_of - {29}),
        ({3}, all_of - {3}),
    ]:
        mine = others if rank == size - 1 else some
        grads = [np.ones(2) if number in mine else None for number in every.values()]
        if whole:
            error = raised(opt.minimize, gives(*grads))
        else:
            pairs = [
                pair for pair in zip(grads, every, strict=True) if pair[0] is not None
            ]
            error = raised(opt.apply_gradients, pairs)
        assert type(error) is DisagreementError
        assert f"gradient of {min(some ^ others)} must be the same" in str(error)
    assert not any(var.value.any() for var in every)
    opt.minimize(gives(*[np.ones(2)] * 30))
    assert all((var.value == -1).all() for var in every)


def test_a_second_initialize_names_no_other_variables(make, rank):
    w, opt = variable(np.zeros(3)), make()
    opt.initialize([w])
    opt.initialize([w])
    opt.initialize(None)
    error = raised(opt.initialize, [variable(np.zeros(5))])
    opt.minimize(gives(np.ones(3)))
    opt.free()

    assert type(error) is InvalidArgumentError
    assert "was initialized without this variable" in str(error)
    assert (w.value == -1).all()
    assert type(raised(opt.gradient_arrays)) is hpc.FreedError


def test_a_bad_global_step_on_one_rank_is_an_error_on_all(make, rank, size):
    w, opt = variable(), make()
    step = hpc.Variable(0.5 if rank == size - 1 else 0, "step")
    error = raised(opt.apply_gradients, [(1.0, w)], step)

    assert type(error) is TypeError
    assert w.value == 0


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


def test_pairs_may_come_from_an_iterator(make, size):
    w, opt = variable(), make()
    for _ in range(2):
        opt.apply_gradients(zip([1.0], [w], strict=True))

    assert w.value == -2 * size


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
def test_a_rank_whose_loss_raised_goes_on_after_an_error_on_all(make, rank, size):
    w, opt = variable(), make()

    def broken():
        raise ValueError("no batch")

    opt.initialize([w])
    if rank == 0:
        assert type(raised(opt.minimize, broken)) is ValueError
    error = raised(opt.minimize, gives(1.0))
    assert type(error) is DisagreementError
    assert "calls of compute_gradients must be the same" in str(error)
    assert w.value == 0
    for step in range(3):
        assert opt.minimize(gives(1.0)).global_step == step

    np.testing.assert_allclose(w.value, -3, rtol=1e-15)


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


@pytest.mark.ranks(min=2)
@pytest.mark.own_comm  # the optimizers are the first
def test_two_optimizers_in_different_order_are_never_mixed(make, rank):
    w, v = variable(), variable()
    calls = [(make(), w, 1.0), (make(), v, 10.0)]
    for opt, var, _ in calls:
        opt.initialize([var])
    opt, var, grad = calls[rank != 0]
    error = raised(opt.apply_gradients, [(grad, var)])

    assert type(error) is DisagreementError
    assert "rank 0 in 'CrossShardOptimizer (number 1): reduction 1'" in str(error)
    assert "in 'CrossShardOptimizer (number 2): reduction 1'" in str(error)
    assert (w.value, v.value) == (0, 0)


# Arguments


def test_bad_groups_are_refused_by_all(comm, rank, size):
    everybody = list(range(size))
    bad = [
        [[]],
        [everybody, [0]],
        [[0, *everybody]],
        [everybody[1:], []],
        [[size, *everybody[1:]]],
        [[-1, *everybody[1:]]],
        [[0.5, *everybody[1:]]],
        [tuple(everybody)],
        (everybody,),
        np.array([everybody]),
        "01",
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


@pytest.mark.parametrize(
    "reduction", ["mean", "MEAN", "SUM", None, 1, "weighted_sum_over_batch_size"]
)
def test_other_reductions_are_refused(comm, reduction):
    with pytest.raises(InvalidArgumentError, match="reduction"):
        hpc.CrossShardOptimizer(hpc.SGD(1), reduction, comm=comm)


def test_no_groups_is_one_group_of_all(make, size):
    for groups in (None, []):
        w, opt = variable(), make(groups=groups)
        opt.apply_gradients([(1.0, w)])
        assert w.value == -size


def test_communicators_of_groups_are_given_back(comm, size):
    opt = hpc.CrossShardOptimizer(
        hpc.SGD(1), group_assignment=[[r] for r in range(size)], comm=comm
    )
    opt.free()

    # MPICH has 2048 context ids.
    assert opt._split.comm == opt._split.node == MPI.COMM_NULL
