"""Slots: gradients computed in the memory from which a take reads them."""

import ctypes
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import hpcaccum as hpc

from ..common import VAIN, WAIT, same_bits
from .acting import Background, at, close_unreduced, everywhere, in_threads

pytestmark = pytest.mark.any_size


def apply_in_slot(acc, value, step=0):
    slot = acc.slot(timeout=WAIT)
    slot[:] = value
    return acc.apply_grad(slot, step)


def test_slot_is_memory_of_the_declared_shape(acc):
    slot = acc.slot(timeout=0)

    assert (slot.shape, slot.dtype) == ((2,), np.float64)
    assert slot.flags.writeable
    assert slot.flags.c_contiguous
    slot[:] = 7
    for shape in (None, (2,), [2], 2):
        assert acc.slot(shape).ctypes.data == slot.ctypes.data
    for shape in [(1,), (2, 1), ()]:
        with pytest.raises(hpc.InvalidArgumentError, match="slot must have shape"):
            acc.slot(shape)


def memory_of(slot):
    """Return another view of a slot's memory, which stays writable."""
    address = (ctypes.c_char * slot.nbytes).from_address(slot.ctypes.data)
    return np.frombuffer(address, slot.dtype)


@pytest.mark.parametrize("given", [lambda slot: slot, memory_of])
def test_gradient_in_its_slot_is_not_copied(make, rank, given):
    # It is recognized by its address.
    acc = make(storage="slots")
    if rank == 0:
        slot = acc.slot()
        slot[:] = [1, 1]
        assert acc.apply_grad(given(slot))
        memory_of(slot)[:] = [7, 8]
    same_bits(at(0, acc.take_grad, 1, timeout=WAIT), [7.0, 8.0])


def test_slot_outlives_the_round_it_was_made_in(acc):
    slots = []

    def fill():
        acc.apply_grad([1, 1], 0)
        slots.append(acc.slot(timeout=0))
        slots[0][:] = [5, 6]

    at(1, fill)
    same_bits(at(0, acc.take_grad, 1, timeout=WAIT), [1.0, 1.0])
    at(1, lambda: acc.apply_grad(slots[0], 1))
    same_bits(at(0, acc.take_grad, 1, timeout=WAIT), [5.0, 6.0])


def test_slot_of_a_dropped_gradient_can_be_applied_again(acc):
    at(0, acc.set_global_step, 2)

    def twice():
        slot = acc.slot(timeout=0)
        slot[:] = [3, 4]
        return [bool(acc.apply_grad(slot, step)) for step in (1, 2)]

    assert at(1, twice) == [False, True]
    same_bits(at(0, acc.take_grad, 1, timeout=WAIT), [3.0, 4.0])


def test_slot_may_be_applied_reversed_or_converted(acc):
    def odd(change, step):
        # With a gradient of the former round not yet reduced only one buffer is free.
        slot = acc.slot(timeout=WAIT)
        slot[:] = [step, 2]
        return acc.apply_grad(change(slot), step)

    changes = [lambda s: s[::-1], lambda s: s.astype("f"), lambda s: s.tolist()]
    for step, change in enumerate(changes):
        at(1, odd, change, step)
        expected = [2.0, step] if step == 0 else [step, 2.0]
        same_bits(at(0, acc.take_grad, 1, timeout=WAIT), np.array(expected, float))


def test_slot_is_awaited_while_both_buffers_are_held(acc):
    at(1, apply_in_slot, acc, [1, 2], 0)
    at(0, close_unreduced, acc)
    at(1, apply_in_slot, acc, [3, 4], 1)

    with pytest.raises(hpc.WaitTimeoutError, match=r"slot: waited .* both buffers"):
        at(1, acc.slot, timeout=VAIN)
    # A gradient in other memory needs no slot.
    assert at(1, acc.apply_grad, [5, 6], 1)
    waiting = Background(1, lambda: acc.slot(timeout=WAIT))
    assert not waiting.over()
    same_bits(at(0, acc.take_grad, 1, timeout=WAIT), [1.0, 2.0])
    assert waiting.result().shape == (2,)
    at(1, apply_in_slot, acc, [10, 11], 1)
    same_bits(at(0, acc.take_grad, 3, timeout=WAIT), [6.0, 7.0])


def test_only_free_buffer_takes_a_gradient_that_overlaps_it(acc):
    at(1, apply_in_slot, acc, [1, 2], 0)
    at(0, close_unreduced, acc)

    def overlapping():
        slot = acc.slot(timeout=0)
        slot[:] = [3, 4]
        acc.apply_grad(slot[::-1], 1)

    at(1, overlapping)
    same_bits(at(0, acc.take_grad, 1, timeout=WAIT), [1.0, 2.0])
    same_bits(at(0, acc.take_grad, 1, timeout=WAIT), [4.0, 3.0])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("storage", ["slots", "sum"])
def test_slot_of_a_half_is_float32(make, dtype, storage):
    acc = make(dtype, storage=storage)
    assert acc.slot().dtype == np.float32
    at(1, apply_in_slot, acc, [1, 2])
    at(1, apply_in_slot, acc, [3, 4])

    same_bits(at(0, acc.take_grad, 2, timeout=WAIT), np.array([2, 3], dtype))


def test_slot_needs_a_shape_where_it_is_not_fixed(make):
    acc = make(shape=(2, None), capacity=6)
    for shape in [None, (2, None), (3, 2), (2, 4), (2,), 6]:
        with pytest.raises(hpc.InvalidArgumentError, match="slot"):
            acc.slot(shape)
    slot = acc.slot((2, 3))

    assert slot.shape == (2, 3)
    slot[:] = 2
    assert everywhere(acc.apply_grad, slot)
    same_bits(at(1, acc.take_grad, 1, timeout=WAIT), np.full((2, 3), 2.0))


def test_slot_that_was_applied_is_no_longer_the_callers(acc):
    def refused(slot, *views):
        with pytest.raises(ValueError, match="read-only"):
            slot[:] = [3, 4]
        # A view of it may be writable; a gradient in it is rejected nevertheless.
        for again in (slot, *views):
            with pytest.raises(hpc.InvalidArgumentError, match=r"call slot\(\) again"):
                acc.apply_grad(again)

    def twice():
        slot = acc.slot(timeout=WAIT)
        view = slot[:1]
        slot[:] = [1, 2]
        assert acc.apply_grad(slot)
        refused(slot, slot[::-1], view, slot.reshape(1, 2))
        assert acc.num_accumulated() == 1
        # Nor is a slot after a gradient in other memory.
        new = acc.slot(timeout=WAIT)
        new[:] = [9, 9]
        assert acc.apply_grad([5, 6])
        refused(new)

    at(1, twice)
    same_bits(at(0, acc.take_grad, 2, timeout=WAIT), [3.0, 4.0])


def test_slots_of_two_threads_are_two(acc):
    def both():
        mine = acc.slot(timeout=WAIT)
        with ThreadPoolExecutor(1) as other:
            theirs = other.submit(acc.slot, timeout=WAIT).result()
            assert not np.may_share_memory(mine, theirs)
            mine[:], theirs[:] = [3, 4], [1, 2]
            # Both buffers are lent, so a third thread gets none.
            with pytest.raises(hpc.WaitTimeoutError, match="another thread of this"):
                in_threads(lambda: acc.slot(timeout=VAIN))
            assert acc.apply_grad(mine)
            assert other.submit(acc.apply_grad, theirs).result()

    at(1, both)
    same_bits(at(0, acc.take_grad, 2, timeout=WAIT), [2.0, 3.0])


def test_slot_is_not_written_to_by_other_threads(acc):
    def hold():
        slot = acc.slot(timeout=WAIT)
        for step in range(4):
            slot[:] = [10, step]
            for value in (1, 3):
                grad = np.array([value, 0.0])
                assert in_threads(lambda g=grad, step=step: acc.apply_grad(g, step))[0]
            same_bits(*in_threads(lambda: acc.take_grad(2, timeout=WAIT)), [2.0, 0.0])
            same_bits(slot.copy(), [10.0, step])
        assert acc.apply_grad(slot, 4)

    at(1, hold)
    same_bits(at(0, acc.take_grad, 1, timeout=WAIT), [10.0, 3.0])


def test_apply_waits_for_a_buffer_that_no_other_thread_holds(acc, monkeypatch):
    at(1, acc.apply_grad, [1, 2], 0)
    at(0, close_unreduced, acc)

    def hold():
        slot = acc.slot(timeout=WAIT)
        slot[:] = [5, 6]
        monkeypatch.setenv("HPCACCUM_TIMEOUT", str(VAIN))
        with pytest.raises(hpc.WaitTimeoutError, match="another thread of this rank"):
            in_threads(lambda: acc.apply_grad([7, 8], 1))
        monkeypatch.setenv("HPCACCUM_TIMEOUT", str(WAIT))
        assert acc.apply_grad(slot, 1)
        assert in_threads(lambda: acc.apply_grad([7, 8], 1))[0]

    at(1, hold)
    same_bits(at(0, acc.take_grad, 1, timeout=WAIT), [1.0, 2.0])
    same_bits(at(0, acc.take_grad, 2, timeout=WAIT), [6.0, 7.0])


def test_slot_of_a_thread_that_has_ended_is_given_to_another(acc):
    def ask():
        slots = [in_threads(lambda: acc.slot(timeout=WAIT))[0] for _ in range(3)]
        assert not slots[0].flags.writeable
        assert slots[2].flags.writeable
        assert acc.apply_grad([1, 2])

    at(1, ask)
    same_bits(at(0, acc.take_grad, 1, timeout=WAIT), [1.0, 2.0])
