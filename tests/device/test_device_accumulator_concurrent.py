"""DeviceAccumulator: streams, threads, and takes that wait."""

from __future__ import annotations

import concurrent.futures
import gc
import threading

import cupy
import numpy as np
import pytest

import hpcaccum as hpc
from hpcaccum.device import kernels

from .. import naive
from .accumulating import WAIT, like, same_bits


@pytest.mark.parametrize("seed", range(6))
def test_accumulator_does_what_the_naive_one_does(acc, form, seed):
    random, model = np.random.default_rng(seed), naive.Accumulator()
    kept, taken = [], []
    for number in range(60):
        what = random.choice(["apply", "take", "step", "count"], p=[0.6, 0.2, 0.1, 0.1])
        if what == "apply":
            values = np.full(2, 2.0 ** (number % 40))
            lag = random.integers(-2, 2)
            receipt = acc.apply_grad(like(form, values), model.step - lag)
            kept.append((receipt, model.apply_grad(values, model.step - lag), lag))
        elif what == "take":
            required = int(random.integers(1, 4))
            if model.count < required:
                with pytest.raises(hpc.WaitTimeoutError):
                    acc.take_grad(required, timeout=0)
            else:
                expected = model.take_grad(required)
                taken.append((acc.take_grad(required, timeout=0), expected))
        elif what == "step":
            model.set_global_step(int(random.integers(-3, 6)))
            acc.set_global_step(model.step)
        else:
            assert acc.num_accumulated() == model.count
    assert acc.global_step == model.step
    for receipt, accepted, lag in kept:
        assert (receipt.accepted, receipt.lag) == (accepted, lag)
        assert receipt.global_step - receipt.local_step == lag
    # Results are the caller's: later gradients do not change them.
    for result, expected in taken:
        same_bits(form, result, expected)


def test_streams_take_turns(acc, form):
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(3)]
    for step in range(4):
        for number, stream in enumerate(streams):
            with stream:
                gradient = like(form, [number, 0])
                for array in [gradient] if form == "one" else gradient.values():
                    array += step
                acc.apply_grad(gradient, step)
                del gradient, array
        with streams[step % 3]:
            mean = acc.take_grad(3, timeout=WAIT)
            expected = [1.0 + step, float(step)]
            if form == "one":
                same_bits(form, mean, expected)
            else:
                np.testing.assert_array_equal(mean["weight"].get(), expected)
                negative = [-1.0 + step, float(step)]
                np.testing.assert_array_equal(mean["bias"].get(), negative)


def test_gradient_of_another_stream_may_be_freed_at_once(make, form):
    acc = make("float32", (500,))
    computing, applying = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    for number in 1, 2:
        with computing:
            gradient = like(form, np.full(500, number), "f")
            ready = computing.record()
        with applying:
            applying.wait_event(ready)
            acc.apply_grad(gradient)
        del gradient
        with computing:
            # The pool gives what was freed to the next array of this stream.
            others = [like(form, np.full(500, 99), "f") for _ in range(3)]
        computing.synchronize()

    same_bits(form, acc.take_grad(2, timeout=WAIT), np.full(500, 1.5, "f"))
    del others


def test_gradients_are_kept_no_longer_than_needed(make, form):
    acc, pool = make("float32", (1 << 16,)), cupy.get_default_memory_pool()
    nbytes = 4 << 16
    before = pool.used_bytes()
    for _ in range(20):
        acc.apply_grad(like(form, np.ones(1 << 16), "f"))
        cupy.cuda.Device().synchronize()

    # The last one, of two arrays, and little else.
    assert pool.used_bytes() - before < 3 * nbytes
    acc.take_grad(20, timeout=WAIT)
    assert pool.used_bytes() - before < nbytes


def test_free_gives_all_memory_back():
    pool = cupy.get_default_memory_pool()
    gc.collect()
    before = pool.used_bytes()
    acc = hpc.DeviceAccumulator("float32", {"x": (500,), "y": (5, 3)}, clip_norm=1.0)
    rows = hpc.DeviceRowAccumulator("float32", (50, 3))
    for step in range(2):
        with cupy.cuda.Stream(non_blocking=True):
            x, y = cupy.zeros(500, np.float32), cupy.zeros((5, 3), np.float32)
            acc.apply_grad({"x": x, "y": y}, step)
            acc.take_grad(1, timeout=WAIT)
            acc.apply_grad({"x": x, "y": y}, step + 1)
            rows.apply_grad(cupy.asarray(np.arange(5)), y)
    del x, y
    acc.free()
    rows.free()

    assert pool.used_bytes() == before


def test_every_gradient_is_taken_once(make, form):
    acc = make("float64", reduction_type="SUM")
    # Powers of two: the sum of all sums shows which were taken, and how often.
    sums, applied = [], []

    def work(which):
        with cupy.cuda.Stream(non_blocking=True):
            if which < 2:
                for k in range(10):
                    gradient = like(form, [2.0 ** (10 * which + k), 1.0])
                    applied.append(acc.apply_grad(gradient, 1 << 30))
                return
            while True:
                over = len(applied) == 20
                try:
                    total = acc.take_grad(1, timeout=0)
                except hpc.WaitTimeoutError:
                    if over:
                        return
                else:
                    weight = total if form == "one" else total["weight"]
                    sums.append(weight.get())

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))

    assert np.sum(sums, axis=0).tolist() == [2.0**20 - 1, 20.0]


def test_take_that_gave_up_takes_nothing(acc, form):
    acc.apply_grad(like(form, [1, 0]))
    acc.set_global_step(4)
    message = (
        r"device_accumulator: take_grad\(3\): waited .* for 3 gradients at step 4, "
    )
    with pytest.raises(hpc.WaitTimeoutError, match=message + "had 1"):
        acc.take_grad(3, timeout=0.01)
    assert (acc.num_accumulated(), acc.global_step) == (1, 4)
    acc.apply_grad(like(form, [3, 2]), 4)

    same_bits(form, acc.take_grad(2, timeout=0), [2.0, 1.0])


@pytest.fixture(name="busy")
def busy_fixture(monkeypatch):
    """A device that nothing may wait for; it runs what is queued later."""
    if not cupy.__version__.endswith("simulated"):
        pytest.skip("a real device cannot be kept from finishing its work")

    def fail(*args, **kwargs):
        raise AssertionError("the host waits for the device")

    with monkeypatch.context() as patch:
        patch.setattr(cupy._queues, "progress", 0.0)
        patch.setattr(cupy.cuda.Event, "done", property(lambda event: False))
        for kind in cupy.cuda.Event, cupy.cuda.Stream, cupy.cuda.Device:
            patch.setattr(kind, "synchronize", fail)
        patch.setattr(cupy.ndarray, "get", fail)
        yield patch


def test_no_call_waits_for_the_device(make, form, request):
    acc = make("float64", clip_norm=100.0)
    gradients = [like(form, [number, 2]) for number in range(3)]
    out = like(form, [0, 0])
    patch = request.getfixturevalue("busy")
    receipts = [acc.apply_grad(each, step) for step, each in enumerate(gradients)]
    acc.set_global_step(2)
    receipts.append(acc.apply_grad(gradients[0], 1))
    assert [r.accepted for r in receipts] == [True, True, True, False]
    assert (acc.num_accumulated(), acc.global_step) == (3, 2)
    assert acc.statistics().tally.lags == {0: 3, 1: 1}
    first = acc.take_grad(3, timeout=0)
    acc.apply_grad(gradients[2], 3)
    acc.take_grad(1, timeout=0, out=out)
    patch.undo()

    same_bits(form, first, [1.0, 2.0])
    same_bits(form, out, [2.0, 2.0])


def test_gradient_whose_launch_fails_is_not_counted(acc, form, monkeypatch):
    acc.apply_grad(like(form, [1, 2]))

    def fails(*args):
        raise MemoryError("no launch")

    with monkeypatch.context() as patch:
        patch.setattr(kernels, "kernel", lambda name: fails)
        for use in (
            lambda: acc.apply_grad(like(form, [5, 5])),
            lambda: acc.take_grad(1, timeout=0),
        ):
            with pytest.raises(MemoryError, match="no launch"):
                use()

    assert acc.statistics().tally == hpc.Tally((1,), (0,), {0: 1})
    same_bits(form, acc.take_grad(1, timeout=0), [1.0, 2.0])


CALLS = {
    "apply_grad": lambda acc, form: acc.apply_grad(like(form, [1, 2]), 1 << 30),
    "take_grad": lambda acc, form: acc.take_grad(1, timeout=0),
    "set_global_step": lambda acc, form: acc.set_global_step(5),
    "statistics": lambda acc, form: acc.statistics(),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("during", ["apply_grad", "take_grad"])
def test_a_signal_handler_does_not_wait_for_what_it_has_interrupted(
    acc, form, during, call, monkeypatch
):
    found, launch = [], kernels.kernel

    def interrupted(name):
        patch.undo()
        try:
            CALLS[call](acc, form)
        except hpc.InvalidArgumentError as error:
            found.append(str(error))
        return launch(name)

    acc.apply_grad(like(form, [1, 2]), 1 << 30)
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "kernel", interrupted)
        CALLS[during](acc, form)

    if call != "statistics":
        assert "in a signal handler" in found[0]
    acc.apply_grad(like(form, [1, 2]), 1 << 30)
    same_bits(form, acc.take_grad(1, timeout=0), [1.0, 2.0])


def wait_until_one_takes(acc):
    """Return the error of a second take, as soon as another thread's has begun."""
    message = ""
    while "for a take of another thread" not in message:
        with pytest.raises(hpc.WaitTimeoutError) as caught:
            acc.take_grad(2, timeout=0)
        message = str(caught.value)
    return message


def test_second_take_says_that_another_one_waits(acc, form):
    first = threading.Thread(target=lambda: acc.take_grad(1, timeout=WAIT))
    first.start()
    message = wait_until_one_takes(acc)
    acc.apply_grad(like(form, [1, 1]))
    first.join()

    assert message.startswith("device_accumulator: take_grad(2): waited ")


def test_take_that_waits_hears_that_it_was_freed(acc):
    errors = []

    def take():
        with pytest.raises(hpc.FreedError) as caught:
            acc.take_grad(1, timeout=WAIT)
        errors.append(caught.value)

    first = threading.Thread(target=take)
    first.start()
    wait_until_one_takes(acc)
    acc.free()
    first.join()

    assert len(errors) == 1
