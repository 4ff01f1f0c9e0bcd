"""Arrays that come again are not checked again; any others are."""

from __future__ import annotations

import cupy
import ml_dtypes
import numpy as np
import pytest

import hpcaccum as hpc

STEP = 7
# What may lie where an array of 4 x 4 float32 lay before, and is no such array.
OTHERS = {
    "shape": (lambda array: array.reshape(2, 8), "shape"),
    "order": (lambda array: array.T, "must be contiguous"),
    "strides": (lambda array: array[:2, ::2], "contiguous|shape"),
    "dtype": (lambda array: array.view(np.int32), "got int32"),
    "host": (lambda array: array.get(), "on the device|in host memory"),
    "missing": (lambda array: None, "device|None"),
}
ALL = pytest.mark.parametrize("other", OTHERS)


def squares(count=3):
    return [cupy.asarray(np.full((4, 4), i + 1, np.float32)) for i in range(count)]


@ALL
def test_rules_find_what_is_new_at_an_old_address(other):
    changed, text = OTHERS[other]
    rule, grads = hpc.Momentum(0.5, 0.9), squares()
    variables = [hpc.Variable(cupy.zeros((4, 4), np.float32), f"w{i}") for i in "abc"]
    for _ in range(3):
        rule.apply_gradients(zip(grads, variables, strict=True))
    before = [variable.value.get() for variable in variables]
    given = [grads[0], changed(grads[1]), grads[2]]
    if other == "missing":
        # Which changes the others only.
        rule.apply_gradients(zip(given, variables, strict=True))
        assert (variables[0].value.get() != before[0]).all()
        np.testing.assert_array_equal(variables[1].value.get(), before[1])
        return
    with pytest.raises(hpc.InvalidArgumentError, match=f"'wb'.*({text})"):
        rule.apply_gradients(zip(given, variables, strict=True))

    for variable, value in zip(variables, before, strict=True):
        np.testing.assert_array_equal(variable.value.get(), value)


def test_rules_check_the_rest_of_a_call_before_any_change():
    rule, [grad] = hpc.SGD(lambda: rate), squares(1)
    variable = hpc.Variable(cupy.zeros((4, 4), np.float32), "w")
    rate = 0.5
    for _ in range(2):
        rule.apply_gradients([(grad, variable)])
    with pytest.raises(TypeError, match="global_step"):
        rule.apply_gradients([(grad, variable)], variable)
    with pytest.raises(hpc.InvalidArgumentError, match="twice"):
        rule.apply_gradients([(grad, variable)] * 2)
    rate = -1
    with pytest.raises(hpc.InvalidArgumentError, match="learning_rate"):
        rule.apply_gradients([(grad, variable)])

    assert (variable.value.get() == -1).all()


def test_the_same_gradients_of_other_variables():
    rule, grads = hpc.SGD(1.0), squares(2)
    variables = [hpc.Variable(cupy.zeros((4, 4), np.float32), f"w{i}") for i in "ab"]
    for given in variables, variables[::-1], variables:
        rule.apply_gradients(zip(grads, given, strict=True))
    for variable, value in zip(variables, (-4, -5), strict=True):
        assert (variable.value.get() == value).all()


def test_a_copied_gradient_is_copied_in_each_call():
    """The gradient of a product by one factor is the other one, which changes."""
    rule = hpc.SGD(1.0)
    x, y = (hpc.Variable(each, "xy"[i]) for i, each in enumerate(squares(2)))
    expected = np.array([1.0, 2.0])
    for _ in range(3):
        rule.apply_gradients([(y.value, x), (x.value, y)])
        expected -= expected[::-1].copy()
    assert (x.value.get() == expected[0]).all()
    assert (y.value.get() == expected[1]).all()


@ALL
def test_accumulators_find_what_is_new_at_an_old_address(other):
    changed, text = OTHERS[other]
    acc = hpc.DeviceAccumulator("float32", dict.fromkeys("abc", (4, 4)))
    grads, outs = (dict(zip("abc", squares(), strict=True)) for _ in range(2))
    for _ in range(3):
        acc.apply_grad(grads, STEP)
        acc.take_grad(1, out=outs)
    acc.apply_grad(grads, STEP)
    state = acc.statistics()
    with pytest.raises(hpc.InvalidArgumentError, match=f"gradient 'b'.*({text})"):
        acc.apply_grad({**grads, "b": changed(grads["b"])}, STEP)
    with pytest.raises(hpc.InvalidArgumentError, match=f"out 'b'.*({text})"):
        acc.take_grad(1, out={**outs, "b": changed(outs["b"])})

    assert acc.statistics() == state
    for number, array in enumerate(acc.take_grad(1, out=outs).values(), 1):
        assert (array.get() == number).all()


def test_a_gradient_may_have_a_dtype_that_a_result_may_not():
    acc = hpc.DeviceAccumulator("float32", {"a": (4, 4)})
    half = {"a": squares(1)[0].astype(np.float16)}
    for _ in range(2):
        acc.apply_grad(half)
        with pytest.raises(hpc.InvalidArgumentError, match="must be of float32"):
            acc.take_grad(1, out=half)
    assert acc.num_accumulated() == 2


def test_arrays_of_another_dtype_at_the_same_place_are_others():
    acc = hpc.DeviceAccumulator("float32", {"a": (4,), "none": (0, 3), "b": ()})
    one, none = cupy.ones((), np.float32), cupy.zeros((0, 3), np.float32)
    half = cupy.asarray(np.array([1, 2, 3, 4], np.float16))
    for array in half, half.view(ml_dtypes.bfloat16):
        acc.apply_grad({"b": one, "a": array, "none": none}, STEP)
        sums = acc.take_grad(1)
        np.testing.assert_array_equal(sums["a"].get(), array.get().astype("f4"))


def test_names_in_another_order_are_the_same_arrays():
    acc = hpc.DeviceAccumulator("float32", {"a": (4, 4), "b": (4, 4)})
    one, two = squares(2)
    acc.apply_grad({"a": one, "b": two})
    acc.apply_grad({"b": two, "a": one})
    acc.apply_grad({"a": two, "b": one})
    sums = acc.take_grad(3)
    assert (sums["a"].get() == np.float32(4 / 3)).all()
    assert (sums["b"].get() == np.float32(5 / 3)).all()
