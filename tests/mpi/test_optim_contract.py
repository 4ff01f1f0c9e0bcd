"""The contract of the optimizers that exchange gradients: one set of checks for all.

tests/unit/test_rules.py has that of the rules.
"""

import ml_dtypes
import numpy as np
import pytest

import hpcaccum as hpc
from hpcaccum import InvalidArgumentError

from .training import WRAPPERS, gives, meet, raised, variable

pytestmark = pytest.mark.any_size

DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]


@pytest.fixture(params=WRAPPERS)
def kind(request):
    return request.param


@pytest.fixture
def make(comm, kind, keep):
    """Return a function that makes an optimizer."""

    def make(variables):
        opt = keep(WRAPPERS[kind](hpc.SGD(0.1), variables, comm))
        opt.initialize(variables)
        return opt

    yield make
    meet()


# Training


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


# Bad arguments. tests/unit/test_rules.py has more of them.

BAD_PAIRS = {
    "shape": (lambda w: [(np.ones(3), w)], InvalidArgumentError),
    "all None": (lambda w: [(None, w)], InvalidArgumentError),
    "empty iterator": (lambda w: iter([]), InvalidArgumentError),
    "array": (lambda w: [(np.ones(2), w.value)], TypeError),
    "nothing": (lambda w: None, TypeError),
}


def test_bad_pairs_are_refused_and_change_nothing(make):
    w, step = variable([1.0, 2.0]), hpc.Variable(0, "step")
    opt = make([w])
    found = {
        name: type(raised(opt.apply_gradients, bad(w), step))
        for name, (bad, _) in BAD_PAIRS.items()
    }
    meet()

    assert found == {name: error for name, (_, error) in BAD_PAIRS.items()}
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


def test_a_global_step_is_an_integer_variable(make):
    w = variable()
    opt = make([w])
    found = []
    for step in (0, 0.5, "0", np.array(0), variable(0.5), variable([0], np.int64)):
        found.append(raised(opt.minimize, gives(1.0), step))
        found.append(raised(opt.apply_gradients, [(1.0, w)], step))
    meet()

    assert {type(error) for error in found} == {TypeError}
    assert w.value == 0


def test_what_loss_returns_must_fit(make):
    w = variable([0.0, 0.0])
    opt = make([w])
    for loss, error in [
        (1.0, TypeError),
        (lambda: (0.0, 1.0), TypeError),
        (gives(np.ones(3)), InvalidArgumentError),
    ]:
        assert type(raised(opt.compute_gradients, loss)) is error
    gate = raised(opt.compute_gradients, gives(np.ones(2)), gate_gradients=3)

    assert type(gate) is InvalidArgumentError


def test_a_mapping_of_gradients_names_each_variable(make, kind, rank, size):
    w, v = variable(1.0, name="w"), variable(1.0, name="v")
    opt = make([w, v])
    for which in (range(size), [size - 1]):
        grads = {"w": 1.0} if rank in which else {"w": 1.0, "v": 1.0}
        # Alone, a rank disturbs others only if each update needs all of them.
        if rank in which or kind == "CrossShard":
            error = raised(opt.minimize, lambda grads=grads: (0.0, grads))
            assert type(error) is InvalidArgumentError
            assert "no gradients for ['v'], the variables are ['w', 'v']" in str(error)
    meet()
    assert w.value == v.value == 1
    opt.minimize(lambda: (0.0, {"w": 1.0, "v": None}))

    assert w.value < 1
    assert v.value == 1


# The interface


def test_names(make, kind):
    opt = make([variable()])
    names = {"CrossShard": "CrossShardOptimizer", "SyncReplicas": "sync_replicas"}
    names |= {"DropStale": "DropStaleGradient", "AGN": "AGNOptimizer"}

    assert opt.get_name() == names[kind]
    assert repr(opt) == repr(opt)
    assert " at 0x" not in repr(opt)
