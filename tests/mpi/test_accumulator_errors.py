"""Invalid arguments: an error on every rank, nothing changed, no rank waits."""

import numpy as np
import pytest

import hpcaccum as hpc

from .acting import WAIT, at, meet, same_bits

pytestmark = pytest.mark.any_size

INVALID = hpc.InvalidArgumentError

BAD = [
    ({"dtype": "int32"}, INVALID, "dtype must be one of float16, bfloat16, .* int32"),
    ({"dtype": bool}, TypeError, "dtype must name a float type"),
    ({"dtype": "float33"}, TypeError, "'float33'"),
    ({"dtype": None}, TypeError, "got None"),
    ({"shape": (2, -1)}, INVALID, "no negative dimension"),
    ({"shape": "23"}, TypeError, "shape must be a list, a tuple or None"),
    ({"shape": (2.5,)}, TypeError, "shape must have only integers"),
    ({"shape": (1,) * 17}, INVALID, "16 dimensions, got 17"),
    ({"shape": None}, INVALID, "pass capacity="),
    ({"shape": (None, 2)}, INVALID, "pass capacity="),
    ({"shape": None, "capacity": 0}, INVALID, "capacity must be at least 1"),
    ({"shape": None, "capacity": 2.5}, TypeError, "capacity must be an integer"),
    ({"capacity": 1}, INVALID, r"at least the 2 elements of shape \(2,\), got 1"),
    ({"reduction_type": "mean"}, INVALID, r"\('MEAN', 'SUM'\), got 'mean'"),
    ({"reduction_type": 1}, TypeError, "reduction_type"),
    ({"host": -1}, INVALID, "host must be a rank of the communicator"),
    ({"host": 4}, INVALID, r"host .*\(0 to \d\), got 4"),
    ({"host": True}, TypeError, "host must be a rank"),
    ({"storage": "ram"}, INVALID, "storage must be one of"),
    ({"shared_name": 5}, TypeError, "shared_name must be text"),
    ({"workers": 0}, INVALID, "workers must be at least 1"),
    ({"workers": 5}, INVALID, r"workers must be at most the number of ranks, \d"),
    ({"shape": (2**45,)}, INVALID, r"needs \d+\.\d MiB of /dev/shm"),
    ({"shape": (2**45,), "storage": "sum"}, INVALID, r"/dev/shm, .* --shm-size"),
]


def construct(options):
    options = {"dtype": "float32", "shape": (2,), **options}
    return hpc.ConditionalAccumulator(**options)


def test_bad_argument_of_every_rank_or_of_one(rank, size):
    wrong = size - 1
    for options, error, text in BAD:
        with pytest.raises(error, match=text):
            construct(options)
        if size == 1 or options.get("shape") == (2**45,):
            continue
        with pytest.raises(error, match=text) as caught:
            construct(options if rank == wrong else {})
        assert rank == wrong or f"rank {wrong}: " in str(caught.value)
    # After all these errors the ranks still agree on the order of calls.
    with construct({"shared_name": "after refusals"}) as acc:
        at(1, acc.apply_grad, [1, 2])
        same_bits(at(0, acc.take_grad, 1, timeout=WAIT), np.float32([1, 2]))


@pytest.mark.ranks(min=2)
def test_ranks_that_disagree_all_hear_of_both_sides(rank, size):
    odd = size - 1
    for field, value, expected in [
        ("name", "other", "name must be .* rank 0 has '.*', rank {} has 'other'"),
        ("dtype", "float64", "dtype .* has dtype..float32.., rank {} has .*float64"),
        ("shape", (3,), r"shape .* rank 0 has \(2,\), rank {} has \(3,\)"),
        ("reduction_type", "SUM", "reduction .* rank 0 has 'MEAN', rank {} has 'SUM'"),
        ("host", 1, "host .* rank 0 has 0, rank {} has 1"),
        ("storage", "sum", "storage .* rank 0 has 'slots', rank {} has 'sum'"),
        ("shared_name", "s", "shared_name .* rank 0 has '', rank {} has 's'"),
        ("workers", 1, r"workers .* rank 0 has \d, rank {} has 1"),
        ("capacity", 9, "capacity .* rank 0 has 8, rank {} has 9"),
    ]:
        options = {"shape": None, "capacity": 8} if field == "capacity" else {}
        with pytest.raises(hpc.DisagreementError, match=expected.format(odd)) as caught:
            construct({**options, field: value} if rank == odd else options)
        assert str(caught.value).endswith(f"(rank {odd} unlike rank 0)")


def test_ways_to_say_the_same_do_agree(rank):
    dtypes = ["float32", np.float32, np.dtype("f4"), "<f4"]
    shapes = [(2,), [2], 2, (np.int64(2),)]
    host = [0, np.int64(0)][rank % 2]
    options = {"dtype": dtypes[rank], "shape": shapes[rank], "host": host}
    reduction = [None, "MEAN"][rank % 2]
    with construct({**options, "reduction_type": reduction}) as acc:
        assert acc.dtype == np.float32
        assert acc.slot().shape == (2,)


NO_NUMBERS = [None, [1j, 0], ["1", "2"], [[1], [1, 2]], {1: 2}, b"12", 2**70]
# There is no broadcasting.
NO_SHAPES = [1.0, [1.0], [[1.0, 2.0]], [1.0, 2.0, 3.0], []]
MASKED = [np.ma.masked_array([1, 2], mask) for mask in (False, [False, True])]


def test_gradient_must_be_an_array_of_real_numbers_of_its_shape(make):
    acc = make()
    for gradients, text in [
        (NO_NUMBERS, "gradient"),
        (NO_SHAPES, r"must have shape \(2,\), got shape \("),
        (MASKED, r"gradient must have no mask.*filled\(0\)"),
    ]:
        for gradient in gradients:
            with pytest.raises(INVALID, match=text):
                at(1, acc.apply_grad, gradient)
    assert at(0, acc.num_accumulated) == 0


NO_STEPS = [None, "1", [], [1], np.array([1]), np.nan, np.inf, 1j, 2**63, 1e30]


def test_step_that_is_not_one_number_adds_nothing(make):
    acc = make()
    for step in NO_STEPS:
        with pytest.raises(INVALID, match="local_step"):
            at(1, acc.apply_grad, [1, 1], local_step=step)
        with pytest.raises(INVALID, match="new_global_step"):
            at(1, acc.set_global_step, step)

    at(0, acc.apply_grad, [3, 1])
    same_bits(at(1, acc.take_grad, 1, timeout=WAIT), [3.0, 1.0])


@pytest.mark.parametrize(("shape", "bits"), [((2,), 41), (None, 33)])
def test_step_that_can_be_set_can_be_left(make, shape, bits):
    acc = make(shape=shape, **({} if shape else {"capacity": 2}))
    most = 2 ** (bits - 1)
    for step in (most, -most):
        with pytest.raises(INVALID, match="step must be within"):
            at(1, acc.set_global_step, step)
    for step in (most - 1, 1 - most):
        at(1, acc.set_global_step, step)
        assert at(2, acc.apply_grad, [1, 1], step)
        assert not at(2, acc.apply_grad, [1, 1], step - 1)
        at(2, acc.take_grad, 1, timeout=WAIT)
        assert at(0, lambda: acc.global_step) == step + 1


def test_number_required_is_an_integer_of_at_least_1(make):
    acc = make()
    at(0, acc.apply_grad, [1, 1])
    for required in (0, -1, 2**31, None, [1], np.array([1, 1])):
        with pytest.raises(INVALID, match="num_required"):
            at(1, acc.take_grad, required, timeout=WAIT)
    for required in (1.0, "1", np.float32(1), np.array(1.0)):
        with pytest.raises(TypeError, match="num_required"):
            at(1, acc.take_grad, required, timeout=WAIT)
    assert at(0, acc.num_accumulated) == 1
    assert at(0, lambda: acc.global_step) == 0
    for step, required in enumerate([np.int64(1), True, np.array(1), np.uint8(1)], 1):
        same_bits(at(1, acc.take_grad, required, timeout=WAIT), [1.0, 1.0])
        at(0, acc.apply_grad, [1, 1], step)


def test_after_free_every_use_is_an_error():
    acc = construct({})
    acc.free()
    acc.free()
    uses = [
        lambda: acc.apply_grad([1, 2]),
        lambda: acc.take_grad(1),
        acc.num_accumulated,
        lambda: acc.set_global_step(1),
        lambda: acc.global_step,
        acc.slot,
        acc.leave,
        acc.statistics,
    ]
    for use in uses:
        with pytest.raises(hpc.FreedError, match="'conditional_accumulator' was freed"):
            use()
    assert repr(acc) == "<ConditionalAccumulator 'conditional_accumulator', freed>"
    assert (acc.name, acc.dtype) == ("conditional_accumulator", np.float32)
    assert all(expected == acc.name for expected in meet(acc.name))


def test_errors_are_what_a_caller_would_guess():
    assert issubclass(INVALID, ValueError)
    assert issubclass(hpc.DisagreementError, ValueError)
    assert issubclass(hpc.WaitTimeoutError, TimeoutError)
    assert issubclass(hpc.FreedError, RuntimeError)
    assert issubclass(hpc.MPIUnavailableError, ImportError)
