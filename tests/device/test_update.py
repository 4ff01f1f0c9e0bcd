"""kernels/update.cu against the rules' NumPy lines: the same bits."""

from __future__ import annotations

import cupy
import numpy as np
import pytest

import hpcaccum as hpc

from .launching import DTYPES, SIZES, SUMS, Watched, i64, launch, normal

RULES = {
    "sgd": lambda: hpc.SGD(0.1),
    "momentum": lambda: hpc.Momentum(0.1, 0.9),
    "nesterov": lambda: hpc.Momentum(0.1, 0.9, use_nesterov=True),
    "adagrad": lambda: hpc.Adagrad(0.1),
    "adam": lambda: hpc.Adam(0.01),
    "adam with decay": lambda: hpc.Adam(0.01, weight_decay=0.1),
}
# Each kernel, by the rule whose line it is.
KERNELS = [name for name in RULES if " " not in name]


def same_bits(found, expected):
    assert found.dtype == expected.dtype
    assert found.tobytes() == expected.tobytes()


@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("rule", RULES)
def test_rules_give_the_bits_of_the_host(kind, rule):
    dtype = DTYPES[kind]
    start = normal(1025, dtype, 9)
    here, there = (hpc.Variable(xp.array(start), "w") for xp in (np, cupy))
    host, device = RULES[rule](), RULES[rule]()
    for step in range(3):
        grad = normal(1025, dtype, step)
        host.apply_gradients([(grad, here)])
        device.apply_gradients([(cupy.asarray(grad), there)])
    same_bits(there.value.get(), here.value)
    for name in host.get_slot_names():
        same_bits(
            device.get_slot(there, name).value.get(), host.get_slot(here, name).value
        )


@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("size", SIZES)
def test_only_what_there_is_is_changed(kind, name, size, shift):
    wide = DTYPES[SUMS[kind]]
    rule = RULES[name]()
    slots = dict(sorted(rule._slots().items()))
    value, grad = normal(size, DTYPES[kind], 1), normal(size, wide, 2)
    watched = [Watched(np.full(size, start, wide), shift) for start in slots.values()]
    target, source = Watched(value, shift), Watched(grad, 1 - shift)
    scalars = map(
        wide.type, (*rule._numbers(rule.learning_rate, 1), *rule._constants())
    )
    launch(f"{name}_{kind}", target, source, *watched, i64(size), *scalars, size=size)

    variable = hpc.Variable(value.astype(DTYPES[kind]), "w")
    rule.apply_gradients([(grad, variable)])
    if size:
        same_bits(target.get(), variable.value)
        for each, slot in zip(watched, slots, strict=True):
            same_bits(each.get(), rule.get_slot(variable, slot).value)
    same_bits(source.get(), grad)


@pytest.mark.parametrize("name", KERNELS)
def test_the_gradient_may_be_the_variable(name):
    start = normal(1025, np.float32)
    here, there = (hpc.Variable(xp.array(start), "w") for xp in (np, cupy))
    for variable in (here, there):
        RULES[name]().apply_gradients([(variable.value, variable)])

    same_bits(there.value.get(), here.value)


@pytest.mark.parametrize("name", KERNELS)
def test_what_is_no_number_stays_what_it_is(name):
    values = np.array([np.nan, np.inf, -np.inf, 0, -0.0, 1e38], np.float32)
    here, there = (hpc.Variable(xp.ones(6, xp.float32), "w") for xp in (np, cupy))
    with np.errstate(all="ignore"):
        RULES[name]().apply_gradients([(values, here)])
    RULES[name]().apply_gradients([(cupy.asarray(values), there)])

    np.testing.assert_array_equal(there.value.get(), here.value)
