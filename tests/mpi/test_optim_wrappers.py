"""The optimizers that exchange gradients, each of which holds another one.

tests/unit/test_rules.py has the tests of the rules.
"""

import contextlib
import functools

import ml_dtypes
import numpy as np
import pytest

import hpcaccum as hpc
from hpcaccum import DisagreementError, FreedError, InvalidArgumentError

from ..common import check_error
from .acting import in_threads
from .support import meet
from .training import ONE_SIDED, WRAPPERS, Gate, gives, raised, started, variable

pytestmark = pytest.mark.any_size


DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]


@pytest.fixture(params=WRAPPERS)
def kind(request):
    return request.param


@pytest.fixture
def make(make_one, kind):
    yield lambda own: make_one(WRAPPERS[kind], hpc.SGD(0.1), own, variables=own)
    meet()


def test_arrays_and_their_dtypes_stay(make):
    arrays, grads = ([np.ones((2, 3), dtype) for dtype in DTYPES] for _ in "ab")
    for grad in grads:
        grad.flags.writeable = False
    own = [hpc.Variable(array, f"w{n}") for n, array in enumerate(arrays)]
    opt = make(own)
    for _ in range(2):
        opt.minimize(gives(*grads))

    for w, array, grad, dtype in zip(own, arrays, grads, DTYPES, strict=True):
        assert w.value is array
        assert (w.dtype, w.shape) == (dtype, (2, 3))
        assert (array.astype(float) < 1).all()
        assert (grad == 1).all()


def test_minimize_returns_a_receipt_with_the_loss(make, kind):
    w = variable()
    opt = make([w])
    value = object()
    receipts = [opt.minimize(lambda: (value, [1.0])) for _ in range(2)]
    opt.leave()
    before = opt.global_step
    sent = sum(meet(sum(bool(r) for r in receipts if r.sent)))

    assert all(receipt.loss is value for receipt in receipts)
    assert all(receipt or kind == "DropStale" for receipt in receipts)
    lags = [(receipt.lag, receipt.global_step) for receipt in receipts]
    assert all(0 <= lag <= step <= before for lag, step in lags)
    assert sum(opt.statistics().accepted) == sent > 0
    assert opt.center(w).shape == ()


def test_bad_arguments_are_refused_and_change_nothing(make):
    w, step = variable([1.0, 2.0]), hpc.Variable(0, "step")
    opt, ones = make([w]), np.ones(2)
    no_steps = 0, 0.5, "0", np.array(0), variable(0.5), variable([0], np.int64)
    for call, args, error in [
        (opt.apply_gradients, ([(np.ones(3), w)], step), InvalidArgumentError),
        (opt.apply_gradients, ([(None, w)], step), InvalidArgumentError),
        (opt.apply_gradients, (iter([]), step), InvalidArgumentError),
        (opt.apply_gradients, ([(ones, w.value)], step), TypeError),
        (opt.apply_gradients, (None, step), TypeError),
        *((opt.apply_gradients, ([(ones, w)], bad), TypeError) for bad in no_steps),
        *((opt.minimize, (gives(ones), bad), TypeError) for bad in no_steps),
        (opt.compute_gradients, (1.0,), TypeError),
        (opt.compute_gradients, (lambda: (0.0, 1.0),), TypeError),
        (opt.compute_gradients, (gives(np.ones(3)),), InvalidArgumentError),
        # The last one is gate_gradients.
        (opt.compute_gradients, (gives(ones), None, 3), InvalidArgumentError),
    ]:
        assert type(raised(call, *args)) is error, args
    meet()

    assert w.value.tolist() == [1, 2]
    assert step.value == 0
    assert opt.variables() == []


def test_a_list_of_something_else_is_a_type_error(kind, comm):
    w = variable([1.0, 2.0])
    opt = WRAPPERS[kind](hpc.SGD(1), [w], comm)
    found = []
    for initialized in (False, True):
        if initialized:
            opt.initialize([w])
        for bad in ([w.value], "w", w, [w, None], 7):
            found.append(raised(opt.compute_gradients, gives(np.ones(2)), bad))
            found.append(raised(opt.minimize, gives(np.ones(2)), var_list=bad))
        meet()
    opt.free()

    assert {type(error) for error in found} == {TypeError}
    assert w.value.tolist() == [1, 2]


def test_a_mapping_of_gradients_names_each_variable(make, kind, rank, size):
    w, v = variable(1.0, name="w"), variable(1.0, name="v")
    opt = make([w, v])
    for which in (range(size), [size - 1]):
        grads = {"w": 1.0} if rank in which else {"w": 1.0, "v": 1.0}
        # Alone, a rank disturbs others only if each update needs all of them.
        if rank in which or kind == "CrossShard":
            error = raised(opt.minimize, lambda grads=grads: (0.0, grads))
            check_error(error, "no gradients for ['v'], the variables are ['w', 'v']")
    meet()
    assert w.value == v.value == 1
    opt.minimize(lambda: (0.0, {"w": 1.0, "v": None}))

    assert w.value < 1
    assert v.value == 1


def test_slots_are_those_of_the_inner_optimizer(comm, rank, size, kind):
    w, inner, host = variable(np.zeros(2)), hpc.Adam(0.1), rank == size - 1
    options = {"host": size - 1} if kind in ONE_SIDED else {}
    opt = started(WRAPPERS[kind](inner, [w], comm, **options), [w])
    for _ in range(2):
        opt.minimize(gives(np.ones(2)))
    meet()
    slot, count = opt.get_slot(w, "m"), len(opt.variables())
    opt.free()

    assert opt.get_slot_names() == inner.get_slot_names() == ["m", "v"]
    assert [v.name for v in opt.variables()] == [v.name for v in inner.variables()]
    assert opt.get_slot(w, "nothing") is None
    if host or kind not in ("SyncReplicas", "DropStale"):
        for each in slot, opt.get_slot(w, "m"):
            assert (each.value > 0).all()
        # Two slots and a step; with AGN, also those of the center.
        assert count == 3 * (1 + (host and kind == "AGN"))
    else:
        assert slot is None
        assert count == 0


def test_after_free_it_is_of_no_use(comm, kind):
    w = variable()
    opt = started(WRAPPERS[kind](hpc.SGD(1), [w], comm), [w])
    opt.free()
    opt.free()
    calls = [
        lambda: opt.initialize([w]),
        lambda: opt.compute_gradients(gives(1.0)),
        lambda: opt.apply_gradients([(1.0, w)]),
        lambda: opt.minimize(gives(1.0)),
    ]
    if kind in ONE_SIDED:
        calls += [opt.leave, opt.serve]

    assert {type(raised(call)) for call in calls} == {FreedError}
    assert w.value == 0
    assert opt.waited >= 0


def test_what_was_never_initialized_says_so(comm, kind):
    w = variable()
    opt = WRAPPERS[kind](hpc.SGD(1), [w], comm)
    asks = [opt.statistics, lambda: opt.global_step, lambda: opt.center(w)]
    calls = [*asks, opt.leave, opt.gradient_arrays]
    if kind in ONE_SIDED:
        calls.append(opt.serve)
    errors = [raised(call) for call in calls]
    waited = opt.waited
    opt.free()

    assert {type(error) for error in errors} == {InvalidArgumentError}
    assert waited == 0
    assert {type(raised(ask)) for ask in asks} == {FreedError}
    assert type(raised(opt.initialize, [w])) is FreedError


def test_initializing_again_changes_nothing(comm, kind):
    w = variable()
    with WRAPPERS[kind](hpc.SGD(1), [w], comm) as opt:
        for _ in range(2):
            opt.initialize([w])
        opt.initialize(None)
        error = raised(opt.initialize, [variable(np.zeros(5))])
        meet()
        for _ in range(2):
            opt.minimize(gives(1.0))

    assert isinstance(error, InvalidArgumentError)
    assert w.value == -(2 if kind == "CrossShard" else opt.global_step) < 0


def test_with_frees_it_unless_something_went_wrong(comm, rank, kind):
    w = variable()
    opt = started(WRAPPERS[kind](hpc.SGD(1), [w], comm), [w])
    w.value[...] = rank + 5
    with pytest.raises(KeyError), opt:
        raise KeyError
    assert w.value == rank + 5
    with opt as same:
        assert same is opt

    # At the end, variables have the values of the center.
    assert w.value == (0 if kind in ONE_SIDED else rank + 5)
    assert type(raised(opt.minimize, gives(1.0))) is FreedError


def test_every_is_true_once_for_each_multiple_passed(comm, rank, size, kind):
    w, last = variable(), dict.fromkeys((1, 2, 5, 7, 1000), 0)
    opt = WRAPPERS[kind](hpc.SGD(0.1), [w], comm)
    check_error(raised(opt.every, 5), "initialize")
    opt.initialize([w])
    assert not opt.every(1)
    meet()
    for turn in range(8):
        opt.minimize(gives(1.0))
        meet()
        # No rank makes an update; ranks may look at different times.
        for n, before in last.items():
            if turn % 3 != rank % 3 or kind == "CrossShard":
                assert opt.every(n) is (opt.global_step // n > before)
                assert not opt.every(n)
                last[n] = opt.global_step // n
        meet()
    for n, error_type in (
        (0, InvalidArgumentError),
        (None, InvalidArgumentError),
        (2.5, TypeError),
    ):
        assert type(raised(opt.every, n)) is error_type
    meet()
    opt.free()
    assert opt.every(1000) is False


def test_every_begins_with_the_step_that_is_restored(comm, rank, kind):
    w = variable()
    with started(WRAPPERS[kind](hpc.SGD(0.1), [w], comm), [w]) as opt:
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
    with WRAPPERS[kind](hpc.SGD(0.1), [w], comm) as opt:
        opt.restore(saved, [w])
        assert not opt.every(reached)


def test_the_learning_rate_is_that_of_the_inner_optimizer(comm, rank, kind):
    w, inner = variable(), hpc.SGD(0.5)
    with started(WRAPPERS[kind](inner, [w], comm), [w]) as opt:
        error = raised(setattr, opt, "learning_rate", -1)
        assert opt.learning_rate == inner.learning_rate == 0.5
        opt.learning_rate = 2
        assert opt.learning_rate == inner.learning_rate == 2
        meet()  # the rate of the host counts
        for _ in range(2):
            opt.minimize(gives(1.0))

    assert type(error) is InvalidArgumentError
    updates = 2 if kind == "CrossShard" else opt.global_step
    assert w.value == -2 * updates < 0


@pytest.mark.parametrize("wrapper", ["SyncReplicas", "DropStale"])
def test_the_host_decides_on_the_rate_of_the_center(comm, rank, size, wrapper):
    w = variable()
    with started(WRAPPERS[wrapper](hpc.SGD(1), [w], comm, host=size - 1), [w]) as opt:
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
    with started(ONE_SIDED["AGN"](hpc.SGD(rate), [w], comm), [w]) as opt:
        for _ in range(4):
            opt.minimize(gives(1.0))

    own = [0, 1, 2, 3]
    center = list(range(2 * size)) if rank == 0 else []
    assert sorted(seen) == sorted([*own, *center])


def test_an_inner_optimizer_without_a_learning_rate_gets_none(comm, kind):
    opt = WRAPPERS[kind](Gate(lambda: None), [variable()], comm)
    errors = [
        raised(lambda: opt.learning_rate),
        raised(setattr, opt, "learning_rate", 1),
    ]
    opt.free()

    assert [type(error) for error in errors] == [AttributeError] * 2
    assert not hasattr(opt.inner, "learning_rate")


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
def test_different_inner_optimizers_are_refused_by_all(comm, rank, size, kind):
    w = variable()

    def start(inner):
        opt = WRAPPERS[kind](inner, [w], comm)
        try:
            opt.initialize([w])
        finally:
            opt.free()

    for other, text in (
        (hpc.SGD(0.2), "learning_rate=0.2"),
        (hpc.Momentum(0.1, 0.5), f"rank {size - 1} has"),
    ):
        error = raised(start, hpc.SGD(0.1) if rank < size - 1 else other)
        check_error(error, text, kind=DisagreementError)


CLASSES = {
    "CrossShard": hpc.CrossShardOptimizer,
    "SyncReplicas": hpc.SyncReplicasOptimizer,
    "DropStale": hpc.DropStaleGradientOptimizer,
    "AGN": hpc.AGNOptimizer,
}
# For each class, and for all with a server: options with wrong values, and the errors.
WRONG = {
    "CrossShard": {
        "reduction": [("mean", "MEAN", "SUM", None, 1), ()],
        "on_loss": [("abort",), ()],
    },
    "SyncReplicas": {
        "replicas_to_aggregate": [(0, -1, 1 << 20, [1]), (1.0, "1")],
        "total_num_replicas": [(0,), ()],
        "lateness": [(2, "linear", lambda lag: -1), ()],
    },
    "DropStale": {
        "staleness": [(), (1.0, "1", [1])],
        "lateness": [
            ("linear", lambda lag: 1 + lag, lambda lag: np.nan, lambda lag: "1"),
            (),
        ],
    },
    "AGN": {
        "communication_period": [(0, -3, None), (2.0, "2")],
        "custom_getter": [(), ({},)],
    },
}
WRONG_PLACES = {
    "host": [(-1, 1000), (0.0,)],
    "servers": [([], [0, 0], "all", 1000, [0, -1]), ()],
}


@pytest.mark.parametrize("kind", CLASSES)
def test_a_wrong_option_of_one_rank_is_an_error_on_all(comm, rank, size, kind):
    wrong = {**WRONG[kind], "on_nonfinite": [("ignore",), ()]}
    wrong["wire_dtype"] = [("int8",), ("words",)]
    if kind != "CrossShard":
        wrong |= WRONG_PLACES
    for option, values in wrong.items():
        for value, expected in [
            *((each, InvalidArgumentError) for each in values[0]),
            *((each, TypeError) for each in values[1]),
        ]:
            mine = {option: value} if rank == size - 1 else {}
            error = raised(CLASSES[kind], hpc.SGD(1), comm=comm, **mine)
            assert type(error) is expected, (option, value, error)
            assert option in str(error)


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("kind", CLASSES)
def test_different_options_are_refused_by_all(comm, rank, size, kind):
    together, alone = [list(range(size))], [[each] for each in range(size)]
    different = {
        "CrossShard": {
            "reduction": (hpc.Reduction.MEAN, hpc.Reduction.SUM),
            "group_assignment": (together, alone),
            "sync": (True, False),
        },
        "SyncReplicas": {"replicas_to_aggregate": (2, 3), "total_num_replicas": (2, 3)},
        "DropStale": {
            "staleness": (2, 3),
            "lateness": ("inverse", lambda lag: 0.5),
        },
        "AGN": {"communication_period": (2, 3), "num_worker": (2, 3)},
    }[kind] | {"on_nonfinite": ("accept", "drop"), "wire_dtype": (None, "float16")}
    if kind != "CrossShard":
        different |= {"servers": ([0], [0, 1]), "dedicated": (False, True)}
    for option, values in different.items():
        options = {option: values[rank == size - 1]}
        error = raised(CLASSES[kind], hpc.SGD(1), comm=comm, **options)
        assert type(error) is DisagreementError, (option, error)
        named = "servers" if option == "dedicated" else option
        assert f"{named} must be the same" in str(error)


@pytest.mark.parametrize("bad", [0, "world"])
def test_comm_is_a_communicator(bad):
    for kind in CLASSES.values():
        assert type(raised(kind, hpc.SGD(1), comm=bad)) is TypeError


def test_reports_add_up_to_the_statistics(comm, rank, size, kind):
    variables, reports = [variable()], []
    opt = WRAPPERS[kind](hpc.SGD(0.1), variables, comm)
    log = hpc.log_to(reports.append, every=1e-9) if rank == 0 else None
    with log or contextlib.nullcontext():
        with opt:
            opt.initialize(variables)
            for _ in range(6):
                opt.minimize(gives(1.0), var_list=variables)
        counts, steps = opt.statistics(), opt.global_step

    if rank == 0:
        # The first push begins; the others, and the end, report.
        assert len(reports) == (3 if kind == "AGN" else 6)
        assert {each["optimizer"] for each in reports} == {opt.get_name()}
        last = reports[-1]
        assert (last["step"], tuple(last["accepted"])) == (steps, counts.accepted)
        assert tuple(last["dropped"]) == counts.dropped
        assert all(0 <= each["waiting"] <= 1 for each in reports)
        assert all(each["updates_per_second"] >= 0 for each in reports)


def test_only_one_thread_at_a_time(comm, kind):
    w, errors = variable(np.zeros(1)), []
    opt = started(WRAPPERS[kind](hpc.SGD(1), [w], comm), [w])
    push = functools.partial(opt.minimize, gives(np.ones(1)))

    def in_thread(call, *args):
        errors.extend(in_threads(lambda: raised(call, *args)))

    def loss():
        in_thread(opt.gradient_arrays)
        in_thread(opt.apply_gradients, [(np.ones(1), w)])
        in_thread(push)
        return 0.0, [np.ones(1)]

    opt.minimize(loss)
    assert {type(error) for error in errors} == {InvalidArgumentError}
    for error, name in zip(
        errors, ("gradient_arrays", "apply_gradients", "minimize"), strict=True
    ):
        assert f": {name} was called" in str(error)
        assert "another thread of this rank" in str(error)
    # One after the other they may.
    in_thread(push)
    opt.free()
    assert isinstance(errors[-1], hpc.Receipt)


def test_names(make, kind):
    opt = make([variable()])
    names = {"CrossShard": "CrossShardOptimizer", "SyncReplicas": "sync_replicas"}
    names |= {"DropStale": "DropStaleGradient", "AGN": "AGNOptimizer"}

    assert opt.get_name() == names[kind]
    assert repr(opt) == repr(opt)
    assert " at 0x" not in repr(opt)
