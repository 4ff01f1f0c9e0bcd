"""DeviceAccumulator: what is refused, with nothing changed."""

from __future__ import annotations

import cupy
import numpy as np
import pytest

import hpcaccum as hpc
from hpcaccum.accumulator.receipts import Tally

from .accumulating import (  # noqa: F401
    INVALID,
    acc_fixture,
    form_fixture,
    like,
    make_fixture,
    same_bits,
)

BAD_GRADIENTS = [
    (lambda: np.ones(2, "f"), "must be an array on the device, got ndarray"),
    (lambda: [1.0, 1.0], "must be an array on the device, got list"),
    (lambda: None, "must be an array on the device, got NoneType"),
    (lambda: cupy.ones(3, "f"), r"must have shape \(2,\), got \(3,\)"),
    (lambda: cupy.ones((2, 1), "f"), r"must have shape \(2,\), got \(2, 1\)"),
    (lambda: cupy.ones((), "f"), r"must have shape \(2,\), got \(\)"),
    (lambda: cupy.ones(4, "f")[::2], "must be contiguous, got strides"),
    (lambda: cupy.ones(2, "d"), "must be of float16, bfloat16, float32, got float64"),
    (lambda: cupy.ones(2, "i4"), "got int32"),
]


@pytest.mark.parametrize(("bad", "text"), BAD_GRADIENTS, ids=lambda o: str(o)[:40])
def test_bad_gradients_are_refused_and_change_nothing(make, form, bad, text):
    acc = make()
    gradient = bad()
    if form == "named":
        gradient = {**like(form, [1, 1], "f"), "bias": gradient}
    with pytest.raises(INVALID, match=f"gradient.*{text}"):
        acc.apply_grad(gradient)

    assert acc.num_accumulated() == 0
    assert acc.statistics().tally == Tally((0,), (0,), {})


def test_calls_on_another_device_are_refused_and_change_nothing(
    make, form, monkeypatch
):
    monkeypatch.setenv("CUPY_SIMULATOR_DEVICES", "2")
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")
    acc = make()
    acc.apply_grad(like(form, [1, 1], "f"))
    text = "is on device 0, the current one is 1"
    with cupy.cuda.Device(1):
        with pytest.raises(INVALID, match=text):
            acc.apply_grad(like(form, [5, 5], "f"))
        with pytest.raises(INVALID, match=text):
            acc.take_grad(1)

    same_bits(form, acc.take_grad(1), np.ones(2, "f"))
    tally = acc.statistics().tally
    assert (tally.accepted, tally.dropped) == ((1,), (0,))


def test_mappings_have_all_names_and_no_others():
    with hpc.DeviceAccumulator("f4", {"a": (2,), "b": ()}, name="net") as acc:
        a, b = cupy.ones(2, "f"), cupy.ones((), "f")
        for wrong, text in [
            ({"a": a}, "net: gradient must have an array 'b'"),
            ({"a": a, "b": b, "c": b}, "must have no array 'c'"),
            (a, "must be a mapping of names to arrays, got ndarray"),
        ]:
            with pytest.raises(INVALID, match=text):
                acc.apply_grad(wrong)
        assert acc.apply_grad({"b": b, "a": a})
        with pytest.raises(INVALID, match="out must have an array 'b'"):
            acc.take_grad(1, out={"a": a})
        mean = acc.take_grad(1, timeout=0)

    assert list(mean) == ["a", "b"]
    assert [array.get().tolist() for array in mean.values()] == [[1.0, 1.0], 1.0]


@pytest.mark.parametrize("step", [None, "1", [1, 2], 1j, np.nan, np.inf, 2**63])
def test_step_that_is_not_one_number_adds_nothing(acc, form, step):
    with pytest.raises(INVALID, match="local_step must be one number"):
        acc.apply_grad(like(form, [1, 1]), step)
    with pytest.raises(INVALID, match="new_global_step must be one number"):
        acc.set_global_step(step)

    assert (acc.num_accumulated(), acc.global_step) == (0, 0)


@pytest.mark.parametrize(
    ("required", "error"),
    [(0, INVALID), (-1, INVALID), (None, INVALID), (1.0, TypeError), ("1", TypeError)],
)
def test_number_required_is_an_integer_of_at_least_1(acc, form, required, error):
    acc.apply_grad(like(form, [1, 1]))
    with pytest.raises(error, match="num_required must be"):
        acc.take_grad(required, timeout=0)

    assert acc.num_accumulated() == 1


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        (lambda: np.zeros(2), "must be an array on the device"),
        (lambda: cupy.zeros(3), "must have shape"),
        (lambda: cupy.zeros(2, "f"), "must be of float64, got float32"),
        (lambda: cupy.zeros(4)[::2], "must be contiguous"),
    ],
)
def test_out_that_does_not_fit_loses_nothing(acc, form, bad, text):
    acc.apply_grad(like(form, [1, 2]))
    out = bad() if form == "one" else {**like(form, [0, 0]), "weight": bad()}
    with pytest.raises(INVALID, match=f"out.*{text}"):
        acc.take_grad(1, out=out)

    same_bits(form, acc.take_grad(1, timeout=0), [1.0, 2.0])


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"dtype": "int32"}, INVALID, "dtype must be one of"),
        ({"dtype": None}, TypeError, "got None"),
        ({"shape": None}, INVALID, "must be known, got None"),
        ({"shape": (2, None)}, INVALID, r"must be known, got \(2, None\)"),
        ({"shape": {"a": (2, -1)}}, INVALID, "no negative dimension"),
        ({"shape": "23"}, TypeError, "shape must be a list"),
        ({"reduction_type": "mean"}, INVALID, r"\('MEAN', 'SUM'\), got 'mean'"),
        ({"clip_norm": 0}, INVALID, "clip_norm must be positive, got 0"),
        ({"clip_norm": np.nan}, INVALID, "clip_norm must be positive"),
        ({"clip_norm": "1"}, TypeError, "clip_norm must be a number"),
    ],
    ids=str,
)
def test_bad_arguments(options, error, text):
    with pytest.raises(error, match=text):
        hpc.DeviceAccumulator(**{"dtype": "float32", "shape": (2,), **options})


def test_after_free_every_use_is_an_error(acc, form):
    gradient = like(form, [1, 1])
    acc.free()
    acc.free()

    for use in (
        lambda: acc.apply_grad(gradient),
        lambda: acc.take_grad(1),
        lambda: acc.set_global_step(1),
        lambda: acc.global_step,
        acc.num_accumulated,
        acc.statistics,
    ):
        with pytest.raises(hpc.FreedError, match="'device_accumulator' was freed"):
            use()
