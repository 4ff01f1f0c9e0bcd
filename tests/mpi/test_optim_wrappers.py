"""Optimizers that hold another one: slots, learning rates, constructors."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import hpcaccum as hpc
from hpcaccum import DisagreementError, FreedError, InvalidArgumentError

from .training import ONE_SIDED, WRAPPERS, gives, meet, raised, variable

pytestmark = pytest.mark.any_size


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_slots_are_those_of_the_inner_optimizer(comm, rank, wrapper):
    w, inner = variable(), hpc.Adam(0.1)
    opt = WRAPPERS[wrapper](inner, [w], comm)
    opt.initialize([w])
    for _ in range(2):
        opt.minimize(gives(1.0))
    opt.free()

    assert opt.get_slot_names() == inner.get_slot_names() == ["m", "v"]
    assert [v.name for v in opt.variables()] == [v.name for v in inner.variables()]
    assert opt.get_slot(w, "nothing") is None
    if rank == 0 or wrapper not in ("SyncReplicas", "DropStale"):
        assert opt.get_slot(w, "m").value > 0


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_after_free_it_is_of_no_use(comm, wrapper):
    w = variable()
    opt = WRAPPERS[wrapper](hpc.SGD(1), [w], comm)
    opt.initialize([w])
    opt.free()
    opt.free()
    calls = [
        lambda: opt.initialize([w]),
        lambda: opt.compute_gradients(gives(1.0)),
        lambda: opt.apply_gradients([(1.0, w)]),
        lambda: opt.minimize(gives(1.0)),
    ]
    if wrapper in ONE_SIDED:
        calls += [opt.leave, opt.serve]

    assert {type(raised(call)) for call in calls} == {FreedError}
    assert w.value == 0
    assert opt.waited >= 0


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_with_frees_it_unless_something_went_wrong(comm, wrapper):
    w = variable()
    opt = WRAPPERS[wrapper](hpc.SGD(1), [w], comm)
    with pytest.raises(KeyError), opt:
        raise KeyError
    with opt as same:
        assert same is opt
        opt.initialize([w])

    assert type(raised(opt.minimize, gives(1.0))) is FreedError


# What a loop does now and then


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_every_is_true_once_for_each_multiple_passed(comm, rank, size, wrapper):
    w, last = variable(), dict.fromkeys((1, 2, 5, 7, 1000), 0)
    opt = WRAPPERS[wrapper](hpc.SGD(0.1), [w], comm)
    found = raised(opt.every, 5)
    assert type(found) is InvalidArgumentError
    assert "initialize" in str(found)
    opt.initialize([w])
    assert not opt.every(1)
    meet()
    for turn in range(8):
        opt.minimize(gives(1.0))
        meet()
        # No rank makes an update; ranks may look at different times.
        for n, before in last.items():
            if turn % 3 != rank % 3 or wrapper == "CrossShard":
                assert opt.every(n) is (opt.global_step // n > before)
                assert not opt.every(n)
                last[n] = opt.global_step // n
        meet()
    for n, kind in (
        (0, InvalidArgumentError),
        (None, InvalidArgumentError),
        (2.5, TypeError),
    ):
        assert type(raised(opt.every, n)) is kind
    meet()
    opt.free()
    assert opt.every(1000) is False


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_every_begins_with_the_step_that_is_restored(comm, rank, wrapper):
    w = variable()
    with WRAPPERS[wrapper](hpc.SGD(0.1), [w], comm) as opt:
        opt.initialize([w])
        for _ in range(4):
            opt.minimize(gives(1.0))
        meet()
        reached = opt.global_step
        saved = opt.snapshot() if rank == 0 else None
        assert opt.every(reached)
        meet()
        for _ in range(2):
            opt.minimize(gives(1.0))
        opt.restore(saved)
        assert not opt.every(reached)
        assert not opt.every(1)
        meet()
        for _ in range(4):
            opt.minimize(gives(1.0))
        meet()
        assert opt.global_step == 2 * reached
        assert opt.every(reached)
    w = variable()
    with WRAPPERS[wrapper](hpc.SGD(0.1), [w], comm) as opt:
        opt.restore(saved, [w])
        assert not opt.every(reached)


# Learning rates


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_the_learning_rate_is_that_of_the_inner_optimizer(comm, rank, wrapper):
    w, inner = variable(), hpc.SGD(0.5)
    with WRAPPERS[wrapper](inner, [w], comm) as opt:
        opt.initialize([w])
        error = raised(setattr, opt, "learning_rate", -1)
        assert opt.learning_rate == inner.learning_rate == 0.5
        opt.learning_rate = 2
        assert opt.learning_rate == inner.learning_rate == 2
        meet()  # the rate of the host counts
        for _ in range(2):
            opt.minimize(gives(1.0))

    assert type(error) is InvalidArgumentError
    updates = 2 if wrapper == "CrossShard" else opt.global_step
    assert w.value == -2 * updates < 0


@pytest.mark.parametrize("wrapper", ["SyncReplicas", "DropStale"])
def test_the_host_decides_on_the_rate_of_the_center(comm, rank, size, wrapper):
    w = variable()
    with WRAPPERS[wrapper](hpc.SGD(1), [w], comm, host=size - 1) as opt:
        opt.initialize([w])
        opt.learning_rate = 2 + rank
        meet()
        opt.minimize(gives(1.0))

    assert w.value == -(size + 1) * opt.global_step


def test_a_rate_of_the_step_counts_local_steps_and_those_of_the_center_apart(
    comm, rank, size
):
    def rate(step):
        seen.append(step)
        return 1.0

    w, seen = variable(), []
    with ONE_SIDED["AGN"](hpc.SGD(rate), [w], comm) as opt:
        opt.initialize([w])
        for _ in range(4):
            opt.minimize(gives(1.0))

    own = [0, 1, 2, 3]
    center = list(range(2 * size)) if rank == 0 else []
    assert sorted(seen) == sorted([*own, *center])


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_an_inner_optimizer_without_a_learning_rate_gets_none(comm, wrapper):
    opt = WRAPPERS[wrapper](Own("own"), [variable()], comm)
    errors = [
        raised(lambda: opt.learning_rate),
        raised(setattr, opt, "learning_rate", 1),
    ]
    opt.free()

    assert [type(error) for error in errors] == [AttributeError] * 2
    assert not hasattr(opt.inner, "learning_rate")


# Constructors


class Own(hpc.Optimizer):
    """An optimizer that a user might write."""

    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        for grad, var in grads_and_vars:
            var.value[...] -= grad


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_the_inner_optimizer_may_be_of_the_user(comm, wrapper):
    w = variable()
    with WRAPPERS[wrapper](Own("own"), [w], comm) as opt:
        for _ in range(2):
            opt.minimize(gives(1.0), var_list=[w])

    assert w.value <= -1


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_the_inner_one_must_be_an_optimizer_on_all_ranks(comm, rank, size, wrapper):
    for inner in (None, "SGD", hpc.SGD, 0.1):
        mine = inner if rank == size - 1 else hpc.SGD(1)
        error = raised(WRAPPERS[wrapper], mine, [variable()], comm)
        assert type(error) is TypeError
        assert "must be an Optimizer, got" in str(error)


@pytest.mark.parametrize("inner", WRAPPERS)
def test_nestings_that_corrupt_are_refused(comm, inner):
    w = variable()
    with WRAPPERS[inner](hpc.SGD(1), [w], comm) as held:
        for outer in WRAPPERS:
            found = raised(WRAPPERS[outer], held, [w], comm)
            if inner == outer == "CrossShard":
                assert found.inner is held
                found.free()
                continue
            names = type(held).__name__, outer, "cannot hold"
            assert type(found) is InvalidArgumentError
            assert all(name in str(found) for name in names)


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_different_inner_optimizers_are_refused_by_all(comm, rank, size, wrapper):
    mine = hpc.SGD(0.1) if rank < size - 1 else hpc.Momentum(0.1, 0.5)
    error = raised(WRAPPERS[wrapper], mine, [variable()], comm)

    assert type(error) is DisagreementError
    assert f"rank {size - 1} has" in str(error)


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_different_rates_are_refused_by_all(comm, rank, size, wrapper):
    w, rate = variable(), 0.1 if rank < size - 1 else 0.2

    def start():
        opt = WRAPPERS[wrapper](hpc.SGD(rate), [w], comm)
        try:
            opt.initialize([w])
        finally:
            opt.free()

    error = raised(start)

    assert type(error) is DisagreementError
    assert "learning_rate=0.2" in str(error)


def odd(rank, size, usual, other):
    return other if rank == size - 1 else usual


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("wrapper", ONE_SIDED)
def test_different_options_are_refused_by_all(comm, rank, size, wrapper):
    for option, usual, other in (("host", 0, 1), ("dedicated", False, True)):
        options = {option: odd(rank, size, usual, other)}
        error = raised(ONE_SIDED[wrapper], hpc.SGD(1), [variable()], comm, **options)
        assert type(error) is DisagreementError


@pytest.mark.ranks(min=2)
def test_different_numbers_are_refused_by_all(comm, rank, size):
    number, inner = odd(rank, size, 2, 3), hpc.SGD(1)
    reduction = odd(rank, size, hpc.Reduction.MEAN, hpc.Reduction.SUM)
    groups = odd(rank, size, [list(range(size))], [[r] for r in range(size)])
    getter = hpc.AGNCustomGetter(comm=comm)
    calls = {
        "staleness": lambda: hpc.DropStaleGradientOptimizer(inner, number, comm=comm),
        "replicas_to_aggregate": lambda: hpc.SyncReplicasOptimizer(
            inner, number, comm=comm
        ),
        "total_num_replicas": lambda: hpc.SyncReplicasOptimizer(
            inner, 1, number, comm=comm
        ),
        "communication_period": lambda: hpc.AGNOptimizer(inner, 1, getter, number),
        "num_worker": lambda: hpc.AGNOptimizer(inner, number, getter),
        "reduction": lambda: hpc.CrossShardOptimizer(inner, reduction, comm=comm),
        "group_assignment": lambda: hpc.CrossShardOptimizer(
            inner, group_assignment=groups, comm=comm
        ),
    }
    for name, call in calls.items():
        error = raised(call)
        assert type(error) is DisagreementError
        assert f"{name} must be the same" in str(error)


@pytest.mark.parametrize("wrapper", ONE_SIDED)
def test_a_host_is_a_rank_of_the_communicator(comm, size, wrapper):
    for host, error in ((size, ValueError), (-1, ValueError), (0.0, TypeError)):
        found = raised(ONE_SIDED[wrapper], hpc.SGD(1), [variable()], comm, host=host)
        assert isinstance(found, error)
        assert "host must be a rank" in str(found)


@pytest.mark.parametrize("bad", [0, "world"])
def test_comm_is_a_communicator(bad):
    for make in (
        lambda: hpc.CrossShardOptimizer(hpc.SGD(1), comm=bad),
        lambda: hpc.SyncReplicasOptimizer(hpc.SGD(1), 1, comm=bad),
        lambda: hpc.DropStaleGradientOptimizer(hpc.SGD(1), 1, comm=bad),
        lambda: hpc.AGNOptimizer(hpc.SGD(1), 1, hpc.AGNCustomGetter(comm=bad)),
    ):
        assert type(raised(make)) is TypeError


@pytest.mark.parametrize("kind", ["sync-replicas", "cross-shard"])
def test_only_one_thread_at_a_time(comm, kind):
    w = hpc.Variable(np.zeros(1, "f4"), "w")
    inner = hpc.SGD(1.0)
    if kind == "cross-shard":
        opt = hpc.CrossShardOptimizer(inner, hpc.Reduction.SUM, comm=comm)
    else:
        opt = hpc.SyncReplicasOptimizer(inner, comm.size, comm=comm)
    opt.initialize([w])
    errors = []

    def use(call):
        try:
            call()
        except hpc.InvalidArgumentError as error:
            errors.append(str(error))

    def loss():
        pair = [(np.ones(1), w)]
        for call in (
            opt.gradient_arrays,
            lambda: opt.apply_gradients(pair),
            lambda: opt.minimize(lambda: (0.0, [np.ones(1)])),
        ):
            other = threading.Thread(target=use, args=(call,))
            other.start()
            other.join()
        return 0.0, [np.ones(1)]

    opt.minimize(loss)
    # One after the other they may.
    other = threading.Thread(target=opt.minimize, args=(lambda: (0.0, [np.ones(1)]),))
    other.start()
    other.join()
    opt.free()

    factor = 1 if kind == "sync-replicas" else comm.size
    assert opt.center(w).tolist() == [-2 * factor]
    calls = [each.split(": ")[1].split(" was called")[0] for each in errors]
    assert calls == ["gradient_arrays", "apply_gradients", "minimize"]
    assert all("another thread of this rank" in each for each in errors)
