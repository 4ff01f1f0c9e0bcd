"""kernels/update.cu against the rules' NumPy lines: the same bits."""

from __future__ import annotations

import itertools

import cupy
import numpy as np
import pytest

import hpcaccum as hpc
from hpcaccum.device import kernels, tables

from ..common import same_bits
from .launching import DTYPES, SIZES, normal

RULES = {
    "sgd": lambda: hpc.SGD(0.1),
    "momentum": lambda: hpc.Momentum(0.1, 0.9),
    "nesterov": lambda: hpc.Momentum(0.1, 0.9, use_nesterov=True),
    "adagrad": lambda: hpc.Adagrad(0.1),
    "adam": lambda: hpc.Adam(0.01),
    "adam with decay": lambda: hpc.Adam(0.01, weight_decay=0.1),
}
# Each kernel, by the rule that it implements.
KERNELS = [name for name in RULES if " " not in name]


class Pair:
    """One optimizer and its variables in host memory, and the same on the device."""

    def __init__(self, rule, starts, shift=0):
        self.host, self.device = RULES[rule](), RULES[rule]()
        self.starts = starts
        self.here = [
            hpc.Variable(start.copy(), f"w{i}") for i, start in enumerate(starts)
        ]
        # Beside elements that must not change, and off their alignment.
        padded = [np.pad(each, (shift, 1), constant_values=77) for each in starts]
        self.memory = [cupy.asarray(each) for each in padded]
        self.there = [
            hpc.Variable(each[shift:-1], f"w{i}") for i, each in enumerate(self.memory)
        ]

    def apply(self, grads, there=None):
        """Update both by the same gradients, some of which may be None."""
        if there is None:
            there = [None if g is None else cupy.asarray(g) for g in grads]
        self.host.apply_gradients(list(zip(grads, self.here, strict=True)))
        self.device.apply_gradients(list(zip(there, self.there, strict=True)))

    def check(self):
        for start, memory in zip(self.starts, self.memory, strict=True):
            shift = memory.size - start.size - 1
            assert (np.delete(memory.get(), slice(shift, -1)) == 77).all()
        for host, device in zip(self.here, self.there, strict=True):
            same_bits(device.value.get(), host.value)
            for name in self.host.get_slot_names():
                one, other = (
                    opt.get_slot(var, name)
                    for opt, var in ((self.host, host), (self.device, device))
                )
                assert (one is None) is (other is None)
                if one is not None:
                    same_bits(other.value.get(), one.value)


@pytest.fixture
def launches(monkeypatch):
    """The names of the kernels that are launched."""
    names, original = [], kernels.kernel

    def counting(name):
        return lambda *args: names.append(name) or original(name)(*args)

    monkeypatch.setattr(kernels, "kernel", counting)
    return names


@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("rule", RULES)
def test_rules_give_the_bits_of_the_host(kind, rule):
    pair = Pair(rule, [normal(1025, DTYPES[kind], 9)])
    for step in range(3):
        pair.apply([normal(1025, DTYPES[kind], step)])
    pair.check()
    strange = np.resize([np.nan, np.inf, -np.inf, 0, -0.0, 1e38], 1025)
    with np.errstate(all="ignore"):
        pair.apply([strange.astype(DTYPES[kind])])
    values = (var.value for var in (*pair.here, *pair.there))
    host, device = (np.asarray(cupy.asnumpy(each), "f8") for each in values)
    np.testing.assert_array_equal(device, host)


@pytest.mark.parametrize("rule", RULES)
def test_variables_of_all_sizes_and_dtypes_are_updated_at_once(rule, launches):
    sizes = [1, 40000, 0, 33, 16384, 5003, 2]
    dtypes = [DTYPES[k] for k in ("f32", "f16")]
    pair = Pair(rule, [normal(n, d, n) for n in sizes for d in dtypes])
    for step in range(2):
        grads = [
            normal(start.size, dtype, step + i)
            for i, (start, dtype) in enumerate(
                zip(pair.starts, 4 * list(DTYPES.values()), strict=False)
            )
        ]
        pair.apply(grads)
    pair.check()
    kernel = rule.split()[0]
    assert launches == 2 * [f"{kernel}_f32", f"{kernel}_f16"]


@pytest.mark.parametrize("rule", RULES)
def test_variables_without_a_gradient_are_left_alone(rule, launches):
    pair = Pair(rule, [normal(n, np.float32, n) for n in (300, 5, 70)])
    grads = [normal(start.size, np.float32, 1) for start in pair.starts]
    for which in ((0, 1, 2), (2,), (0, 2), (1, 0), (0, 1, 2)):
        pair.apply([g if i in which else None for i, g in enumerate(grads)])
    pair.check()
    # The steps of the variables differ, as Adam's rates then do.
    assert len(launches) == 5


def test_streams_may_be_deleted_while_they_work():
    """The next stream gets the address, by which CuPy's pool knows a stream."""
    rule, pairs = hpc.SGD(1.0), []
    for number in range(40):
        value = hpc.Variable(cupy.zeros(300, np.float32), f"w{number}")
        pairs.append((cupy.full(300, number, np.float32), value))
    cupy.cuda.Device().synchronize()
    for pair in pairs:
        with cupy.cuda.Stream(non_blocking=True):
            rule.apply_gradients([pair])
    cupy.cuda.Device().synchronize()
    for number, (_, variable) in enumerate(pairs):
        assert (variable.value.get() == -number).all()


def test_a_table_belongs_to_the_stream_that_copied_it():
    made = tables.RecentTables(lambda number: [number])
    here = made(3)
    with cupy.cuda.Stream(non_blocking=True):
        there = made(3)
    assert there is not here
    assert made(3) is here


def test_the_same_gradients_of_other_variables():
    rule, grads = hpc.SGD(1.0), [cupy.full(3, i, np.float32) for i in (1, 2)]
    variables = [hpc.Variable(cupy.zeros(3, np.float32), f"w{i}") for i in "ab"]
    for given in variables, variables[::-1], variables:
        rule.apply_gradients(zip(grads, given, strict=True))
    for variable, value in zip(variables, (-4, -5), strict=True):
        assert (variable.value.get() == value).all()


def test_gradients_and_variables_lie_on_one_device(monkeypatch):
    monkeypatch.setenv("CUPY_SIMULATOR_DEVICES", "2")
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")
    rule, variable = hpc.SGD(1.0), hpc.Variable(cupy.zeros(3, np.float32), "w")
    with cupy.cuda.Device(1):
        grad = cupy.ones(3, np.float32)
        text = "'w' is on device 1, the variable on device 0"
        with pytest.raises(hpc.InvalidArgumentError, match=text):
            rule.apply_gradients([(grad, variable)])
    assert not variable.value.get().any()


def test_slots_of_initialize_are_ready_on_every_stream():
    start, grad = normal(300, np.float32), normal(300, np.float32, 1)
    pair = Pair("adagrad", [start])
    there = cupy.asarray(grad)
    pair.device.initialize(pair.there)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        pair.apply([grad], [there])
        stream.synchronize()
    pair.check()


@pytest.mark.parametrize("of_grad", DTYPES)
@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("rule", KERNELS)
def test_gradients_of_all_dtypes_are_read_as_they_are(rule, kind, of_grad):
    for shift, size in itertools.product((0, 1), SIZES):
        pair = Pair(rule, [normal(size, DTYPES[kind], 9)], shift)
        memory = cupy.asarray(normal(size + 1, DTYPES[of_grad], 1))
        # Aligned, and not.
        for there in (memory[:size], memory[1:]):
            pair.apply([there.get()], [there])
        pair.check()


@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("name", KERNELS)
def test_the_gradient_may_be_the_variable(name, kind):
    pair = Pair(name, [normal(1025, DTYPES[kind]), normal(3, DTYPES[kind])])
    pair.apply(*[[var.value for var in each] for each in (pair.here, pair.there)])
    pair.check()


@pytest.mark.parametrize("name", KERNELS)
def test_a_gradient_may_be_another_variable(name):
    # In one launch: neither may see the other's new value.
    starts = [normal(20000, np.float32, seed) for seed in (1, 2)]
    pair = Pair(name, starts)
    for _ in range(3):
        here, there = ([var.value for var in each] for each in (pair.here, pair.there))
        pair.apply(here[::-1], there[::-1])
    pair.check()


def test_a_gradient_may_lie_across_its_variable():
    memory = cupy.asarray(np.arange(3000, dtype=np.float32))
    w = hpc.Variable(memory[:2999], "w")
    hpc.SGD(1).apply_gradients([(memory[1:], w)])

    assert (w.value.get() == -1).all()


def test_variables_that_share_memory_are_updated_one_after_the_other(launches):
    memory = cupy.zeros(3000, np.float32)
    both = [hpc.Variable(memory[:2000], "a"), hpc.Variable(memory[1000:], "b")]
    grads = [cupy.ones(2000, np.float32) for _ in both]
    hpc.SGD(1).apply_gradients(list(zip(grads, both, strict=True)))

    assert memory.get().tolist() == 1000 * [-1] + 1000 * [-2] + 1000 * [-1]
    assert len(launches) == 2


@pytest.mark.parametrize("rule", RULES)
def test_gradients_that_are_variables_that_share_memory(rule):
    """Each is what it was before any of the variables changed, as on the host."""
    pair = Pair(rule, [normal(3000, np.float32)])
    for variables in pair.here, pair.there:
        [whole] = variables
        variables += [
            hpc.Variable(whole.value[first : first + 1500], f"w{first}")
            for first in (0, 1000, 1500)
        ]
    for order in (0, 1, 2, 3), (3, 0, 2, 1), (2, 1):
        for opt, variables in (pair.host, pair.here), (pair.device, pair.there):
            opt.apply_gradients([(variables[i].value, variables[i]) for i in order])
        pair.check()
