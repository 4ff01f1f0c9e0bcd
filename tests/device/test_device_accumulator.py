"""DeviceAccumulator does what ConditionalAccumulator does, on one device."""

from __future__ import annotations

import cupy
import numpy as np
import pytest

import hpcaccum as hpc
from hpcaccum.accumulator.receipts import Tally

from .. import naive
from .accumulating import ALL, BFLOAT16, INVALID, WAIT, like, same_bits


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_mean_is_one_true_division_of_the_sum_in_order(make, form, dtype):
    acc = make(dtype, (500,))
    parts = [
        np.random.default_rng(seed).normal(size=500).astype(dtype) for seed in range(3)
    ]
    for part in parts:
        acc.apply_grad(like(form, part, dtype))

    total = parts[0] + parts[1] + parts[2]
    three = total.dtype.type(3)
    assert (total / three != total * (1 / three)).any()
    same_bits(form, acc.take_grad(3, timeout=WAIT), total / three)


@pytest.mark.parametrize("reduction", ["MEAN", "SUM"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_a_gradient_counts_with_its_weight(make, form, dtype, reduction):
    # Exact in any dtype: a product is rounded together with its addition.
    acc, weights = make(dtype, (9,), reduction_type=reduction), [4, 0.5, 3]
    expected, wide = naive.Accumulator(reduction), np.result_type(dtype, np.float32)
    for number, weight in enumerate(weights):
        # Odd, so that no sum is 0.
        part = (2 * np.random.default_rng(number).integers(-4, 4, 9) + 1).astype(dtype)
        acc.apply_grad(like(form, part, dtype), weight=weight, scale=2.0)
        expected.apply_grad(2 * part.astype(wide), weight=weight)
    assert not acc.apply_grad(like(form, part, dtype), -1, weight=9)
    assert (acc.num_accumulated(), acc.statistics().weight) == (3, 7.5)

    found = acc.take_grad(3, timeout=WAIT)
    same_bits(form, found, expected.take_grad(3).astype(dtype))
    assert acc.statistics().weight == 0


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1, 2) * 4, 5, [2, 3]])
def test_scalars_empty_ones_and_many_dimensions(make, form, shape):
    acc = make("float32", shape)
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    gradient = np.arange(np.prod(shape), dtype="f").reshape(shape)
    for number in range(2):
        acc.apply_grad(like(form, gradient + 2 * number, "f"))

    same_bits(form, acc.take_grad(2, timeout=WAIT), gradient + 1)
    assert acc.global_step == 1
    with pytest.raises(INVALID, match=r"gradient.* must have shape"):
        acc.apply_grad(like(form, np.ones((2, *shape)), "f"), 1)


@pytest.mark.parametrize("taken", ALL, ids=str)
@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_gradients_are_converted_to_the_dtype_of_sums(make, form, dtype, taken):
    acc = make(dtype, (5,))
    if np.dtype(taken) == np.float64 != np.dtype(dtype):
        with pytest.raises(INVALID, match=r"must be of .* got float64"):
            acc.apply_grad(like(form, np.ones(5), taken))
        return
    # What is not finite stays in its round, and -0 is kept.
    for step, bad in enumerate([np.nan, np.inf, -0.0]):
        for value in 3, 4:
            values = np.array([value, value, bad, 0, -0.0])
            acc.apply_grad(like(form, values, taken), step)
        out = like(form, np.zeros(5), dtype) if step else None
        mean = acc.take_grad(2, timeout=WAIT, out=out)
        assert out is None or mean is out
        same_bits(form, mean, np.array([3.5, 3.5, bad, 0, -0.0], dtype))


def test_arrays_of_another_dtype_at_the_same_place_are_others():
    acc = hpc.DeviceAccumulator("float32", {"a": (4,), "none": (0, 3), "b": ()})
    one, none = cupy.ones((), np.float32), cupy.zeros((0, 3), np.float32)
    half = cupy.asarray(np.array([1, 2, 3, 4], np.float16))
    for step, array in enumerate([half, half.view(BFLOAT16)]):
        acc.apply_grad({"b": one, "a": array, "none": none}, step)
        sums = acc.take_grad(1)
        np.testing.assert_array_equal(sums["a"].get(), array.get().astype("f4"))


@pytest.mark.parametrize(("dtype", "large"), [("float16", 2048), (BFLOAT16, 256)])
def test_halves_are_summed_in_float32(make, form, dtype, large):
    acc = make(dtype, ())
    half = np.array(large, dtype)
    assert half + half.dtype.type(1) == half
    for value in (large, 1, 1):
        acc.apply_grad(like(form, value, dtype))

    mean = acc.take_grad(3, timeout=WAIT)
    same_bits(form, mean, np.array((large + 2) / 3, dtype))
    for _ in range(3):
        acc.apply_grad(like(form, 40000, dtype), 1)
    same_bits(form, acc.take_grad(3, timeout=WAIT), np.array(40000, dtype))


@pytest.mark.parametrize("dtype", ALL, ids=str)
@pytest.mark.parametrize("reduction", ["MEAN", "SUM"])
def test_long_results_are_clipped_to_the_norm(make, form, dtype, reduction):
    acc = make(dtype, (2,), reduction_type=reduction, clip_norm=1.25)
    # With the negatives, the norm of several arrays is twice as long, in square.
    length = 5 if form == "one" else 5 * np.sqrt(2)
    for _ in range(2):
        acc.apply_grad(like(form, [3, 4], "f2"))
    mean = acc.take_grad(2, timeout=WAIT)

    weight = mean if form == "one" else mean["weight"]
    tolerance = {"float64": 1e-14, "float32": 1e-6, "float16": 1e-3}
    assert weight.dtype == dtype
    np.testing.assert_allclose(
        weight.get().astype(float),
        np.array([3, 4]) * 1.25 / length,
        rtol=tolerance.get(str(dtype), 1e-2),
    )
    # Also after a round whose norm was not finite.
    for step, values in enumerate([[0.25, np.nan], [0.25, 0.5]], 1):
        acc.apply_grad(like(form, values, "f2"), step)
        mean = acc.take_grad(1, timeout=WAIT)
    same_bits(form, mean, np.array([0.25, 0.5], dtype))


def test_statistics_count_what_became_of_gradients(make, form, caplog):
    acc = make("float32", (16,))
    acc.set_global_step(50)
    for step in 50, 51, 49, 48, 48, 0:
        acc.apply_grad(like(form, np.ones(16), "f"), step)
    tally = Tally((2,), (4,), {0: 2, 1: 1, 2: 2, 31: 1})

    arrays = 1 if form == "one" else 2
    assert acc.statistics() == hpc.DeviceStatistics(50, 2, 2, tally, 64 * arrays)
    acc.take_grad(2, timeout=WAIT)
    after = acc.statistics()
    assert (after.global_step, after.num_accumulated, after.tally) == (51, 0, tally)
    acc.set_global_step(2.7)
    assert acc.global_step == 2
    assert "device_accumulator: step lowered from 51 to 2" in caplog.messages


def test_repr_shows_the_numbers(make, form):
    acc = make("float16", (2, 3), name="grads")
    acc.apply_grad(like(form, np.ones((2, 3)), "f2"))

    shape = "(2, 3)" if form == "one" else "3 arrays"
    assert repr(acc) == (
        f"<DeviceAccumulator 'grads' float16 {shape}: step 0, 1 accumulated>"
    )
    assert (acc.name, acc.dtype) == ("grads", np.dtype("float16"))
    acc.free()
    assert repr(acc) == f"<DeviceAccumulator 'grads' float16 {shape}: freed>"


def test_empty_mapping_has_rounds_too():
    with hpc.DeviceAccumulator("float32", {}, clip_norm=1.0) as acc:
        assert acc.apply_grad({})
        assert acc.take_grad(1, timeout=0) == {}
        assert acc.global_step == 1


# What is refused, with nothing changed


BAD_GRADIENTS = [
    (lambda: np.ones(2, "f"), "must be an array on the device, got ndarray"),
    (lambda: cupy.ones(3, "f"), r"must have shape \(2,\), got \(3,\)"),
    (lambda: cupy.ones((2, 1), "f"), r"must have shape \(2,\), got \(2, 1\)"),
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


# Which numbers are bad: see the tests of ConditionalAccumulator.
BAD_NUMBERS = [
    (lambda acc, grad: acc.apply_grad(grad, weight=1e-50), INVALID, "weight"),
    (lambda acc, grad: acc.apply_grad(grad, [1]), INVALID, "local_step"),
    (lambda acc, grad: acc.set_global_step("1"), INVALID, "new_global_step"),
    (lambda acc, grad: acc.take_grad(0, timeout=0), INVALID, "num_required"),
    (lambda acc, grad: acc.take_grad(1.0, timeout=0), TypeError, "num_required"),
]


@pytest.mark.parametrize(("use", "error", "text"), BAD_NUMBERS)
def test_bad_numbers_are_refused_and_change_nothing(make, form, use, error, text):
    acc, grad = make("float32"), like(form, [1, 2], "f")
    acc.apply_grad(grad)
    with pytest.raises(error, match=f"{text} must be"):
        use(acc, grad)

    found = acc.statistics()
    assert (found.global_step, found.num_accumulated, found.weight) == (0, 1, 1)


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
