"""AGNOptimizer: local steps, pushes of means, the custom getter and the hook."""

import numpy as np
import pytest
from mpi4py import MPI

import hpcaccum as hpc
from hpcaccum import InvalidArgumentError
from tests import internals

from ..common import same_bits
from .training import gives, meet, raised, started, turns, variable

pytestmark = pytest.mark.any_size


@pytest.fixture
def make(comm, keep):

    def make(period, values=(0.0,), inner=None, dtype=np.float64, workers=1):
        getter = hpc.AGNCustomGetter(comm=comm)
        variables = [
            hpc.get_variable(f"v{i}", np.array(value, dtype), custom_getter=getter)
            for i, value in enumerate(values)
        ]
        inner = hpc.SGD(1) if inner is None else inner
        optimizer = keep(hpc.AGNOptimizer(inner, workers, getter, period))
        optimizer.initialize()
        return optimizer, *variables

    return make


@pytest.mark.parametrize("period", [1, 2])
@pytest.mark.parametrize("kind", ["arrays", "slices"])
def test_gradients_may_lie_in_the_memory_of_variables(make, rank, period, kind):
    """The gradient of x * y by y is x."""

    def centers(copy):
        opt, v, w = make(period, ([1.0], [2.0]), hpc.SGD(0.5))

        def loss():
            grads = [copy(w.value), copy(v.value)]
            if kind == "slices":
                grads = [hpc.IndexedSlices(each, [0]) for each in grads]
            return 0.0, grads

        if rank == 0:
            for _ in range(period):
                opt.minimize(loss)
        meet()
        return opt.center([v, w])

    for found, expected in zip(centers(np.asarray), centers(np.copy), strict=True):
        same_bits(found, expected)


@pytest.mark.parametrize("how", ["initialize", "compute_gradients", "minimize"])
def test_variables_need_no_getter(comm, rank, size, how):
    x, w = variable(0.0, name="x"), variable(rank)
    host = size - 1
    with hpc.AGNOptimizer(
        hpc.SGD(1), communication_period=2, comm=comm, host=host
    ) as opt:
        if how == "initialize":
            opt.initialize([x, w])
        if how == "compute_gradients":
            for _ in range(2):
                pairs = opt.compute_gradients(lambda: (0.0, [1.0, 3.0]), [x, w])
                opt.apply_gradients(pairs)
        else:
            for _ in range(2):
                opt.minimize(lambda: (0.0, [1.0, 3.0]), var_list=[x, w])
        meet()
        opt.get_init_op(0)()

        assert (x.value, w.value) == (-size, host - 3 * size)
        assert opt.global_step == size


@pytest.mark.parametrize("wrong", [{"comm": MPI.COMM_WORLD}, {"host": 1}])
def test_place_is_that_of_the_getter(comm, wrong):
    getter = hpc.AGNCustomGetter("/job:worker", comm=comm)
    with pytest.raises(InvalidArgumentError, match="are those of the custom getter"):
        hpc.AGNOptimizer(hpc.SGD(1), custom_getter=getter, **wrong)


@pytest.mark.parametrize("num_worker", [1, 5])
def test_momentum_by_hand(make, size, num_worker):
    opt, x = make(2, inner=hpc.Momentum(1, 0.5), workers=num_worker)

    def act(turn):
        opt.minimize(gives(turn + 1.0))
        local = opt.get_slot(x, "momentum").value
        return float(x.value), float(opt.center(x)), float(local)

    columns = list(zip(*turns([size - 1] * 5, act), strict=True))

    assert columns == [
        (-1, -1.5, -5.75, -5.75, -13.8125),
        (0, -1.5, -1.5, -5.75, -5.75),
        (1, 2.5, 4.25, 6.125, 8.0625),
    ]


def test_a_step_counts_pushes_and_changes_only_with_one(make, rank, size):
    opt, _ = make(2)
    step = hpc.Variable(np.int64(-7), "step")

    def act(_):
        receipt = opt.minimize(gives(1.0), step)
        return receipt, int(step.value)

    found = turns([*range(size), *range(size)], act)

    assert found[:size] == [(hpc.Receipt(True, 0, 0, sent=False), -7)] * size
    assert found[size:] == [(hpc.Receipt(True, 0, k), k + 1) for k in range(size)]


def test_half_precision_is_summed_in_single(make):
    opt, x = make(3, dtype=np.float16)
    turns([0] * 3, lambda turn: opt.minimize(gives([2048, 1, 1][turn])))

    assert x.dtype == np.float16
    assert opt.center(x) == -np.float16(2050 / 3) != -np.float16(2048 / 3)


def test_none_leaves_a_variable_out_everywhere(make, rank, size):
    opt, a, b = make(2, [0.0, 0.0])
    turns([0, 0], lambda _: opt.minimize(gives(2.0, 4.0)))

    def act(_):
        opt.minimize(gives(2.0, None))
        return float(a.value), float(b.value), float(opt.center(b))

    found = turns([size - 1] * 2, act)

    # The last rank's b is neither updated, nor pushed, nor pulled.
    b_there = -4 if size == 1 else 0
    assert found == [(-2 - 2 * (size == 1), b_there, -4), (-4, b_there, -4)]


def test_the_sum_of_one_left_out_of_a_push_goes_on(make, size):
    opt, a, b = make(2, [0.0, 0.0])

    def act(turn):
        # b gets 4, None, 8, 16: the second push contains half of their sum.
        opt.minimize(gives(2.0, [4.0, None, 8.0, 16.0][turn]))
        return float(a.value), float(b.value), float(opt.center(b))

    found = turns([size - 1] * 4, act)

    assert found == [(-2, -4, 0), (-2, -4, 0), (-4, -12, 0), (-4, -14, -14)]


def test_the_mean_is_formed_where_it_is_sent_from(make, rank, size):
    opt, x = make(3, [np.zeros(3)])
    copied = []
    with internals.note_copies(copied):
        for call in range(6):
            grad = opt.gradient_arrays()["v0"]
            grad[:] = [1, call, rank]
            opt.minimize(lambda grad=grad: (0.0, [grad]))
    meet()
    mean = [1 + 1, 1 + 4]

    np.testing.assert_allclose(opt.center(x)[:2], [-size * m for m in mean])
    assert copied == []


def test_the_hook_runs_the_init_op_once_begun(comm, rank, size):
    getter = hpc.AGNCustomGetter(comm=comm)
    x = hpc.get_variable("x", np.full(3, float(rank)), custom_getter=getter)
    with hpc.AGNOptimizer(hpc.SGD(1), size, getter) as opt:
        hook = opt.make_session_run_hook(rank == 0, rank)
        early = raised(hook.after_create_session)
        before = x.value.copy()
        hook.begin()
        hook.after_create_session(None, None)
        hook.before_run(None)
        hook.after_run(None, None)
        hook.end(None)

    assert type(early) is InvalidArgumentError
    assert (before == rank).all()
    assert (x.value == 0).all()


def test_without_variables_there_is_no_init_op(comm):
    getter = hpc.AGNCustomGetter(comm=comm)
    hpc.get_variable("fixed", 1.0, trainable=False, custom_getter=getter)
    with hpc.AGNOptimizer(hpc.SGD(1), 1, getter) as opt:
        for call in (opt.get_init_op, lambda _: opt.initialize()):
            assert type(raised(call, 0)) is InvalidArgumentError


def test_variables_of_others_are_unknown(make, comm):
    opt, x = make(1)
    getter = hpc.AGNCustomGetter(comm=comm)
    others = [
        hpc.Variable(0.0, "w"),
        hpc.Variable(0.0, x.name),
        hpc.get_variable("fixed", 0.0, trainable=False, custom_getter=getter),
    ]
    for other in others:
        errors = [
            raised(opt.apply_gradients, [(1.0, x), (1.0, other)]),
            raised(opt.compute_gradients, gives(1.0), [other]),
            raised(opt.initialize, [other]),
            raised(opt.center, other),
        ]
        for error in errors:
            assert isinstance(error, KeyError)
            assert isinstance(error, InvalidArgumentError)
            assert f"'{other.name}' was not created with" in str(error)
        assert x.value == other.value == 0


def test_a_variable_made_after_the_start_is_refused(comm):
    getter = hpc.AGNCustomGetter(comm=comm)
    x = hpc.get_variable("x", 0.0, custom_getter=getter)
    with hpc.AGNOptimizer(hpc.SGD(1), 1, getter, 2) as opt:
        opt.initialize()
        late = hpc.get_variable("late", 0.0, custom_getter=getter)
        errors = [raised(opt.apply_gradients, [(1.0, x), (1.0, late)]) for _ in "12"]

    assert {type(error) for error in errors} == {InvalidArgumentError}
    assert x.value == late.value == 0


def test_names_are_given_once(comm):
    getter = hpc.AGNCustomGetter(comm=comm)
    hpc.get_variable("x", 0.0, custom_getter=getter)

    with pytest.raises(InvalidArgumentError, match="'x' exists already"):
        hpc.get_variable("x", 0.0, custom_getter=getter)


def test_a_push_that_raises_after_it_was_accepted_is_not_repeated(comm, rank, size):
    w, getter = variable(np.zeros(3)), hpc.AGNCustomGetter(comm=comm)
    getter.register(w)
    opt = started(hpc.AGNOptimizer(hpc.SGD(1.0), size, getter, 1), [w])
    if rank == 0:
        with internals.fail_when_accepted(opt, MemoryError):
            assert type(raised(opt.minimize, gives(-np.ones(3)))) is MemoryError
        opt.minimize(gives(-2 * np.ones(3)))
    meet()
    assert opt.global_step == 2
    same_bits(opt.center(w), np.full(3, 3.0))
    meet()
    opt.free()
