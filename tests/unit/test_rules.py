"""Variables, the interface of optimizers, and the update rules."""

from __future__ import annotations

import concurrent.futures
import copy
import functools
import pickle

import ml_dtypes
import numpy as np
import pytest

from hpcaccum.errors import InvalidArgumentError
from hpcaccum.optimizers import update_rule
from hpcaccum.optimizers.base import ExchangeKind
from hpcaccum.optimizers.checks import check_pairs, check_variables
from hpcaccum.optimizers.rules import SGD, Adagrad, Adam, Momentum
from hpcaccum.optimizers.variable import Variable
from hpcaccum.optimizers.wrapper import check_inner

from ..lazy_rules import MAKERS, LazyRule

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = [np.dtype(np.float16), BFLOAT16, np.dtype(np.float32), np.dtype(np.float64)]
SEVERAL_PIECES = (2 * update_rule.PIECE + 17,)
TOLERANCE = {DTYPES[0]: 2e-3, BFLOAT16: 2e-2, DTYPES[2]: 1e-5, DTYPES[3]: 1e-12}


def plain(rule, value, grads):
    """Apply the formulas in float64, to all rows."""
    model = LazyRule(rule, np.atleast_1d(np.asarray(value, np.float64)))
    for grad in grads:
        rows = np.asarray(grad, np.float64).reshape(model.value.shape)
        model.update(range(len(rows)), rows)
    return model.value.reshape(np.shape(value))


def one(value=0.0, dtype=np.float64, name="w"):
    return Variable(np.array(value, dtype), name)


def steps(opt, variable, grads):
    """Return the variable's value after each gradient."""
    seen = []
    for grad in grads:
        opt.apply_gradients([(np.asarray(grad, variable.dtype), variable)])
        seen.append(variable.value.tolist())
    return seen


# What the rules compute: the rule, the first value, gradients, the value after each,
# slots after the last.
BY_HAND = {
    "SGD": (lambda: SGD(0.5), 10, [2, 4, -6], [9, 7, 10], {}),
    "Momentum": (
        *(lambda: Momentum(1, 0.5), 0, [1, 2, 3], [-1, -3.5, -7.75]),
        {"momentum": 4.25},
    ),
    "Nesterov": (
        *(lambda: Momentum(1, 0.5, use_nesterov=True), 0, [1, 2], [-1.5, -4.75]),
        {"momentum": 2.5},
    ),
    "Adagrad": (
        *(lambda: Adagrad(1, initial_accumulator_value=16), 0, [3, 0], [-0.6, -0.6]),
        {"accumulator": 25},
    ),
    "Adam without memory": (
        *(lambda: Adam(1, beta1=0, beta2=0, epsilon=1), 0, [1, -3], [-0.5, 0.25]),
        {"m": -3, "v": 9},
    ),
    # The decay comes before the step, and outside of the moments.
    "AdamW": (
        lambda: Adam(0.5, beta1=0, beta2=0, epsilon=0, weight_decay=0.5),
        *(8, [1], [8 - 2 - 0.5], {"m": 1, "v": 1}),
    ),
}


@pytest.mark.parametrize("case", BY_HAND)
def test_rules_by_hand(case):
    make, start, grads, values, slots = BY_HAND[case]
    opt, w = make(), one(start)

    assert steps(opt, w, grads) == values
    assert [*opt.get_slot_names()] == [*slots]
    for name, value in slots.items():
        assert opt.get_slot(w, name).value == value


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rule", MAKERS)
@pytest.mark.parametrize("shape", [(), (3, 0, 2), (7,), (2, 3, 4), SEVERAL_PIECES])
def test_rules_equal_the_plain_line(rule, dtype, shape):
    random = np.random.default_rng(len(shape))
    start = random.normal(size=shape).astype(dtype)
    grads = [np.asarray(random.normal(size=shape)).astype(dtype) for _ in range(4)]
    w = Variable(start.copy(), "w")
    opt = MAKERS[rule]()

    for grad in grads:
        opt.apply_gradients([(grad, w)])

    error = TOLERANCE[dtype]
    expected = plain(rule, start, grads)
    assert w.dtype == dtype
    np.testing.assert_allclose(w.value.astype(float), expected, error, 4 * error)


def strided(kind, dtype):
    """Return an array of shape (300, 500), more than a piece, that is not plain."""
    if kind == "transposed":
        return np.zeros((500, 300), dtype).T
    if kind == "reversed":
        return np.zeros((300, 500), dtype)[::-1, ::-1]
    if kind == "every other":
        return np.zeros((600, 1000), dtype)[1::2, ::2]
    return np.zeros((300, 500), dtype)


STRIDED = ["plain", "transposed", "reversed", "every other"]


@pytest.mark.parametrize("dtype", [np.dtype(np.float32), BFLOAT16], ids=str)
@pytest.mark.parametrize("of_grad", STRIDED)
@pytest.mark.parametrize("of_value", STRIDED)
def test_any_strides_give_the_same_bits(of_value, of_grad, dtype):
    random = np.random.default_rng(3)
    start, grad = random.normal(size=(2, 300, 500)).astype(dtype)
    expected = Variable(start.copy(), "w")
    w = Variable(strided(of_value, dtype), "w")
    w.value[...] = start
    given = strided(of_grad, dtype)
    given[...] = grad
    opt, other = Momentum(0.5, 0.5), Momentum(0.5, 0.5)

    for _ in range(2):
        opt.apply_gradients([(given, w)])
        other.apply_gradients([(grad, expected)])

    np.testing.assert_array_equal(w.value, expected.value)
    assert w.value.strides == strided(of_value, dtype).strides
    # What lies between the elements is left alone.
    assert of_value != "every other" or not w.value.base[::2].any()


@pytest.mark.parametrize(
    "grad",
    [[1, 2], [1.0, 2.0], np.array([1, 2], np.int8), np.array([1, 2], np.float64)],
    ids=["ints", "floats", "int8", "float64"],
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_of_other_dtypes_are_converted(grad, dtype):
    w = one([0, 0], dtype)

    SGD(1).apply_gradients([(grad, w)])

    assert w.value.tolist() == [-1, -2]


def test_half_precision_keeps_its_state_in_float32():
    w = one([0.0], np.float16)
    opt = Adam(0.25, epsilon=0)

    steps(opt, w, [[1e-4]])

    # 1e-4 squared is less than the smallest float16.
    assert opt.get_slot(w, "v").dtype == np.float32
    np.testing.assert_allclose(w.value, [-0.25], rtol=2e-3)


# In place


@pytest.mark.parametrize("shape", [(), (4,), (2, 2)])
@pytest.mark.parametrize("rule", MAKERS)
def test_the_array_stays_and_the_gradient_is_not_modified(rule, shape):
    array, grad = np.zeros(shape), np.full(shape, 3.0)
    before = array.ctypes.data
    grad.flags.writeable = False
    w = Variable(array, "w")

    MAKERS[rule]().apply_gradients([(grad, w)])

    assert w.value is array
    assert array.ctypes.data == before
    assert (array < 0).all()
    assert (grad == 3).all()


@pytest.mark.parametrize("step", [1, -1])
@pytest.mark.parametrize("rule", MAKERS)
def test_a_gradient_may_be_the_variable_itself_or_lie_across_it(rule, step):
    array = np.arange(1.0, 2.0 + 3 * update_rule.PIECE)
    expected = plain(rule, array, [array[::step]])

    MAKERS[rule]().apply_gradients([(array[::step], Variable(array, "w"))])

    np.testing.assert_allclose(array, expected, 1e-12, 1e-12)


# Slots


def test_a_slot_is_none_before_the_first_update_and_for_other_names():
    opt, w, v = Adam(), one(), one(name="v")
    opt.initialize([w, v, Variable(0, "n")])
    assert opt.get_slot(w, "m") is None
    assert opt.variables() == []

    steps(opt, w, [1])
    opt.initialize([w, v])
    steps(opt, w, [1])

    assert opt.get_slot(w, "m").name == "w/Adam/m"
    assert opt.get_slot(w, "m").value == pytest.approx(1 - 0.9**2)
    assert not opt.get_slot(w, "m").trainable
    assert opt.get_slot(w, "momentum") is None
    assert opt.get_slot(v, "m") is None
    assert opt.get_slot(one(), "m") is None


def test_variables_are_all_state():
    opt, a, b = Adam(), one(name="a"), one(name="b")

    opt.apply_gradients([(1.0, a), (None, b)])
    opt.apply_gradients([(1.0, a), (1.0, b)])

    state = {variable.name: variable.value.tolist() for variable in opt.variables()}
    assert list(state) == [f"{v}/Adam/{s}" for v in "ab" for s in ("m", "v", "step")]
    assert (state["a/Adam/step"], state["b/Adam/step"]) == (2, 1)
    assert SGD(1).variables() == []


def test_variables_of_one_name_have_slots_of_their_own():
    opt, local, center = Momentum(1, 0.5), one(), one()

    steps(opt, local, [1, 2])
    steps(opt, center, [8])

    assert opt.get_slot(local, "momentum").value == 2.5
    assert opt.get_slot(center, "momentum").value == 8


def test_each_variable_counts_its_own_steps():
    opt, a, b, c = Adam(0.5), one(), one(), one()

    steps(opt, a, [1, 2, 3])
    for grad in (1, 2, 3):
        steps(opt, b, [grad])
        steps(opt, c, [1])

    assert a.value == b.value


def test_two_threads_use_one_optimizer():
    opt = Adam(0.5)
    size = 3 * update_rule.PIECE
    pairs = [(np.full(size, i + 1.0), Variable(np.zeros(size), "w")) for i in range(4)]

    def work(pair):
        for _ in range(5):
            opt.apply_gradients([pair])

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(work, pairs))

    for grad, w in pairs:
        alone = Variable(np.zeros(size), "w")
        steps(Adam(0.5), alone, [grad] * 5)
        np.testing.assert_array_equal(w.value, alone.value)


# The interface


def test_minimize_by_hand():
    w = one([4.0])
    step = Variable(np.array(0, np.int32), "step", trainable=False)
    opt = SGD(0.25)

    for _ in range(3):
        result = opt.minimize(lambda: (0, [2 * w.value]), step, [w])

    assert w.value == [0.5]
    assert (step.value, step.dtype) == (3, np.int32)
    assert result is None
    SGD(0.25).apply_gradients(zip([[2.0]], [w], strict=True))
    assert w.value == [0]


def test_gates_names_and_exchange():
    opt = SGD(1, name="mine")

    assert (opt.GATE_NONE, opt.GATE_OP, opt.GATE_GRAPH) == (0, 1, 2)
    assert opt.get_name() == "mine"
    assert opt.exchange is ExchangeKind.LOCAL
    assert repr(opt) == "SGD(learning_rate=1.0, name='mine')"
    assert repr(SGD(lambda: 1)) == "SGD(learning_rate='callable', name='SGD')"


def test_gradients_come_by_order_or_by_name():
    a, b = one(name="a"), one(name="b")
    opt = SGD(1)
    for grads in ([1.0, None], (1.0, None), {"b": None, "a": 1.0}):
        loss = lambda grads=grads: (0, grads)  # noqa: E731
        assert opt.compute_gradients(loss, [a, b]) == [(1.0, a), (None, b)]


def test_a_gradient_is_the_array_that_loss_returned():
    w, grad = one([1.0]), np.ones(1)

    [(found, _)] = SGD(1).compute_gradients(lambda: (0, [grad]), [w])

    assert found is grad


@pytest.mark.parametrize("dtype", [*DTYPES, np.dtype(np.int64)], ids=str)
def test_grad_loss_multiplies_the_gradients(dtype):
    w, grad = one([0.0, 0.0]), np.array([1, 3], dtype)

    [(found, _)] = SGD(1).compute_gradients(lambda: (0, [grad]), [w], grad_loss=2.5)

    assert found.tolist() == [2.5, 7.5]
    assert grad.tolist() == [1, 3]
    assert found.dtype == (np.float64 if dtype.kind == "i" else dtype)


def test_no_var_list_means_that_of_initialize_or_the_first_one():
    w, v = one(name="w"), one(name="v")
    opt = SGD(1)
    opt.initialize([w, v])

    assert opt.compute_gradients(lambda: (0, [1.0, None])) == [(1.0, w), (None, v)]
    other = SGD(1)
    other.minimize(lambda: (0, [1.0]), var_list=[w])
    other.minimize(lambda: (0, [1.0]))
    assert w.value == -2


def test_ignored_arguments_are_accepted():
    w = one()
    SGD(1).minimize(lambda: (0, [1.0]), None, [w], 2, "any", True, "name", 3)

    assert w.value == -3


def test_a_learning_rate_that_is_set_counts_from_the_next_update():
    rates = iter([1, 0.5])
    opt, w = SGD(0.25), one()
    given = [0.125, lambda: next(rates), lambda rate=2: rate, lambda *rates: 0.5]
    for rate in [*given, functools.partial(float, 0.5), 0]:
        assert opt.learning_rate != rate
        opt.learning_rate = rate
        assert opt.learning_rate == rate
        opt.apply_gradients([(4.0, w)])
        if rate is given[1]:
            opt.apply_gradients([(4.0, w)])

    assert w.value == -4 * (0.125 + 1 + 0.5 + 2 + 0.5 + 0.5)
    assert "learning_rate=0.0" in repr(opt)


@pytest.mark.parametrize("bad", [-1, np.inf, np.nan, None, "fast", lambda a, b: 1])
def test_a_bad_learning_rate_changes_nothing(bad):
    opt, w = SGD(0.5), one()
    with pytest.raises(InvalidArgumentError, match="learning_rate must be a number"):
        opt.learning_rate = bad
    with pytest.raises(InvalidArgumentError, match="learning_rate must be a number"):
        SGD(bad)

    assert opt.learning_rate == 0.5
    assert steps(opt, w, [2]) == [-1]
    late = Adam(lambda: bad)
    with pytest.raises(InvalidArgumentError, match="learning_rate must be a number"):
        steps(late, w, [1])
    assert (w.value, late.variables()) == (-1, [])


def test_a_learning_rate_may_depend_on_the_step():
    seen = []

    def schedule(step):
        seen.append(step)
        return 1 / 2**step

    opt, a, b = SGD(0.25), one(name="a"), one(name="b")
    steps(opt, a, [4, 4])
    opt.learning_rate = schedule
    opt.apply_gradients([(1.0, b), (4.0, a)])
    opt.apply_gradients([(1.0, b), (None, a)])
    opt.apply_gradients([(1.0, b), (4.0, a)])

    # The step of the variable that had most updates; b had one when it was alone.
    assert seen == [2, 1, 3]
    assert a.value == -2 - 1 - 0.5
    assert b.value == -0.25 - 0.5 - 0.125


@pytest.mark.parametrize("rule", MAKERS)
def test_other_attributes_are_refused(rule):
    opt = MAKERS[rule]()
    assert f"learning_rate={opt.learning_rate}" in repr(opt)
    for name in ("lr", "learning_rates", "momentum", "beta1", "use_nesterov", "name"):
        with pytest.raises(AttributeError, match=name):
            setattr(opt, name, 0.1)


def test_a_subclass_may_have_attributes_of_its_own():
    class Own(SGD):
        pass

    opt = Own(1)
    opt.calls = 0
    opt.learning_rate = 0.5

    assert steps(opt, one(), [2]) == [-1]


# Variables


@pytest.mark.parametrize("dtype", [*DTYPES, np.int64, np.uint8], ids=str)
def test_a_variable_is_the_array_itself(dtype):
    array = np.zeros((2, 3), dtype)
    w = Variable(array, "w", trainable=False)

    assert w.value is array
    assert (w.name, w.shape, w.dtype, w.trainable) == ("w", (2, 3), array.dtype, False)


def test_assigning_to_the_value_copies():
    array = np.zeros(2, np.float32)
    w = Variable(array, "w")

    w.value = [1, 2]
    w.value += 1

    assert w.value is array
    assert array.tolist() == [2, 3]


@pytest.mark.parametrize(
    ("start", "new"),
    [
        *(([7.0, 8.0], new) for new in (1.0, [1.0], [[1.0, 2.0]], ["a", "b"], None)),
        ([7.0, 8.0], [1j, 1]),
        ([7.0, 8.0], np.ma.zeros(2)),
        ([7, 8], [2.5, 3]),
    ],
)
def test_assigning_something_else_changes_nothing(start, new):
    w = Variable(np.array(start), "w")

    with pytest.raises(InvalidArgumentError, match=r"^value of 'w' "):
        w.value = new

    assert w.value.tolist() == start


def test_repr_shows_numbers():
    w = Variable(np.array([0.5, 2], np.float32), "w", trainable=False)

    assert repr(w) == "Variable('w', float32 (2,), trainable=False, [0.5 2. ])"


@pytest.mark.parametrize(
    "array",
    [
        np.zeros(2, bool),
        np.zeros(2, complex),
        np.zeros(2, ">f4"),
        np.array(["a"]),
        np.array([None]),
        True,
        1j,
        [1.0, [2.0]],
        np.broadcast_to(1.0, 3),
        np.ma.ones(2),
    ],
    ids=repr,
)
def test_values_that_no_variable_can_have(array):
    with pytest.raises(InvalidArgumentError, match="value of 'w'"):
        Variable(array, "w")


def test_what_is_no_array_or_name():
    for array in (None, "text", {}, object()):
        with pytest.raises(TypeError, match="must be a NumPy or CuPy array, got"):
            Variable(array)
    for name in (None, "", 3):
        with pytest.raises(TypeError, match="name must be a non-empty string"):
            Variable(0.0, name)
        with pytest.raises(TypeError, match="name must be a non-empty string"):
            SGD(1, name=name)
    # The arguments in the wrong order: not all of the array is shown.
    with pytest.raises(TypeError, match=r"must be a non-empty string, got .{0,40}$"):
        Variable("w", np.zeros(900))


# Errors change nothing


@pytest.fixture
def model():
    """Two variables and a step, and an optimizer that has state already."""
    a, b = one([1.0, 2.0], np.float32, "a"), one(3.0, np.float32, "b")
    step = Variable(5, "step", trainable=False)
    opt = Adam(0.5)
    opt.apply_gradients([([1.0, 1.0], a), (1.0, b)])
    return opt, a, b, step


def state_of(model):
    opt, *variables = model
    return [v.value.tolist() for v in [*variables, *opt.variables()]]


GOOD = np.ones(2, np.float32)

# These raise an InvalidArgumentError, others a TypeError.
BAD_GRADIENTS = {
    "empty": ((), "no variables provided"),
    "used up": (iter(()), "no variables provided"),
    "integers": (
        lambda a, b: [(GOOD, a), (1, Variable(0, "n"))],
        "'n' is of int64",
    ),
    "all None": (
        lambda a, b: [(None, a), (None, b)],
        r"no gradients provided for any variable: \['a', 'b'\]",
    ),
    "shape": (
        lambda a, b: [(GOOD, a), (GOOD, b)],
        r"gradient of 'b' must have shape \(\), got \(2,\)",
    ),
    "no broadcast": (
        lambda a, b: [(1.0, b), (1.0, a)],
        r"'a' must have shape \(2,\), got \(\)",
    ),
    "complex": (
        lambda a, b: [(GOOD, a), (1j, b)],
        "^gradient of 'b' of dtype complex128 cannot be cast safely to float32",
    ),
    "text": (lambda a, b: [(GOOD, a), ("x", b)], "'b'.*cannot be cast safely"),
    "ragged": (lambda a, b: [([1, [2]], a)], "'a'.*not an array"),
    "mask": (lambda a, b: [(np.ma.ones(2), a)], "gradient of 'a' must have no mask"),
    "twice": (lambda a, b: [(GOOD, a), (GOOD, a)], "given twice"),
}
BAD_PAIRS = {
    "not iterable": (3, "list of pairs.*got int"),
    "no pair": (lambda a, b: [(GOOD, a), b], "got Variable at index 1"),
    "triple": (lambda a, b: [(GOOD, a, b)], "got tuple at index 0"),
    "text pair": (["ab"], "got str at index 0"),
    "no variable": (
        lambda a, b: [(GOOD, a), (1.0, "b")],
        "got str as the variable at index 1",
    ),
    "swapped": (lambda a, b: [(a, GOOD)], "got ndarray as the variable at index 0"),
}


@pytest.mark.parametrize("case", [*BAD_GRADIENTS, *BAD_PAIRS])
def test_bad_pairs(model, case):
    pairs, message = {**BAD_GRADIENTS, **BAD_PAIRS}[case]
    error = TypeError if case in BAD_PAIRS else InvalidArgumentError
    opt, a, b, step = model
    before = state_of(model)

    with pytest.raises(error, match=message):
        opt.apply_gradients(pairs(a, b) if callable(pairs) else pairs, step)

    assert state_of(model) == before


def test_complex_gradients_of_bfloat16_are_refused():
    with pytest.raises(InvalidArgumentError, match="complex64 cannot be cast safely"):
        check_pairs([(np.zeros(1, np.complex64), one([0], BFLOAT16))])


@pytest.mark.parametrize(
    "global_step",
    [1, np.zeros((), int), Variable(1.0), Variable([1]), "step"],
    ids=["int", "array", "float", "vector", "text"],
)
def test_a_global_step_that_is_none(model, global_step):
    opt, a, b, _ = model
    before = state_of(model)

    with pytest.raises(TypeError, match="global_step must be an integer Variable"):
        opt.apply_gradients([(GOOD, a)], global_step)
    with pytest.raises(TypeError, match="global_step must be an integer Variable"):
        opt.minimize(lambda: pytest.fail("was called"), global_step, [a, b])

    assert state_of(model) == before


@pytest.mark.parametrize(
    ("var_list", "error", "message"),
    [
        (None, InvalidArgumentError, r"initialize\(var_list\) first"),
        ([], InvalidArgumentError, "var_list is empty"),
        ([one(), np.zeros(2)], TypeError, "got ndarray at index 1"),
        (["w"], TypeError, "got str at index 0"),
        (one(), TypeError, r"list of Variables, got a Variable: write \[w\]"),
        ("w", TypeError, "must be a list of Variables"),
        (3, TypeError, "must be a list of Variables"),
        ([one(), one()], InvalidArgumentError, "'w'; .* pass a name"),
    ],
)
def test_bad_var_list(var_list, error, message):
    called = []
    for call in (
        SGD(1).initialize,
        check_variables,
        lambda given: SGD(1).minimize(called.append, var_list=given),
    ):
        with pytest.raises(error, match=message):
            call(var_list)
    assert called == []


@pytest.mark.parametrize(
    ("loss", "error", "message"),
    [
        (3.0, TypeError, "callable without arguments.*got float"),
        (lambda: 3.0, TypeError, "must return .value, gradients., got float"),
        (lambda: (1, 2, 3), TypeError, "must return .value, gradients., got tuple"),
        (lambda: (0, np.ones(1)), TypeError, "a list or a mapping.*got ndarray"),
        (lambda: (0, [1.0, 1.0]), InvalidArgumentError, "2 gradients for 1 variables"),
        (lambda: (0, []), InvalidArgumentError, "0 gradients for 1 variables"),
        (lambda: (0, {"v": 1.0}), InvalidArgumentError, r"gradients for \['v'\]"),
        (lambda: (0, {}), InvalidArgumentError, r"no gradients for \['w'\]"),
        (lambda: (0, [GOOD]), InvalidArgumentError, r"shape \(\), got \(2,\)"),
    ],
)
def test_bad_loss(loss, error, message):
    w = one(7.0)

    with pytest.raises(error, match=message):
        SGD(1).minimize(loss, var_list=[w])

    assert w.value == 7


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(({"gate_gradients": gate}, "gate_") for gate in (-1, 3, None, "OP", True)),
        *(({"grad_loss": each}, "grad_loss must be one") for each in ("x", [1, 2], 1j)),
    ],
)
def test_bad_options_of_compute_gradients(options, message):
    with pytest.raises(InvalidArgumentError, match=message):
        SGD(1).compute_gradients(lambda: (0, [1.0]), [one()], **options)


BAD_OPTIONS = {
    "learning_rate": (SGD, [-0.1, np.inf, "0.1", True, np.ones(1)]),
    "momentum": (functools.partial(Momentum, 0.1), [None, np.nan, -np.inf, [0.9]]),
    "initial_accumulator_value": (functools.partial(Adagrad, 0.1), [0, -1]),
    "beta1": (Adam, [1, -0.1]),
    "beta2": (Adam, [1.0]),
    "epsilon": (Adam, [-1]),
    "weight_decay": (Adam, [-1, "none"]),
}


@pytest.mark.parametrize("name", BAD_OPTIONS)
def test_bad_options(name):
    make, values = BAD_OPTIONS[name]
    for value in values:
        with pytest.raises(InvalidArgumentError, match=rf"{name} must be .*, got "):
            make(**{name: value})


def test_what_is_no_optimizer_is_told_what_helps():
    torch = type("SGD", (), {"__module__": "torch.optim.sgd"})()
    for given, text in (
        (SGD, r"got the class SGD; call it: SGD\(0.1\)$"),
        (torch, r"got torch\.optim\.sgd\.SGD; for PyTorch use hpcaccum\.torch$"),
    ):
        with pytest.raises(TypeError, match=text):
            check_inner(given, SGD(1))


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, pickle.dumps])
def test_rules_are_not_copied(way):
    text = r"SGD.* cannot be copied or pickled; snapshot\(\) returns its state"
    with pytest.raises(TypeError, match=text):
        way(SGD(1.0))
