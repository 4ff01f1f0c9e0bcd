"""Many ranks and threads at once: nothing is lost, counted twice, or torn.

Gradients are small integers in float64, so sums are exact. The first element of each is
1: its sum is the number of gradients.
"""

import random
import threading
import time

import numpy as np
import pytest

import hpcaccum as hpc

from .acting import WAIT, at, everywhere, in_threads, same_bits

ANY_STEP = 2**40
WIDTH = 200
BOTH = pytest.mark.parametrize("storage", ["slots", "sum"])


def gradient(rank, value):
    """Return 1, then the value in the columns of the rank, in all of them."""
    made = np.zeros((5, WIDTH))
    made[0], made[1 + rank] = 1, value
    return made


def drain(acc):
    total = np.zeros((5, WIDTH))
    while acc.num_accumulated():
        total += acc.take_grad(1, timeout=WAIT)
    return total


def take_while(acc, going_on, required):
    total = np.zeros((5, WIDTH))
    while going_on():
        try:
            found = acc.take_grad(required, timeout=0.01)
        except hpc.WaitTimeoutError:
            continue
        assert (found == found[:, :1]).all(), "torn"
        total += found
    return total


@BOTH
def test_accepted_is_what_is_taken(make, storage, rank, size):
    acc = make(shape=(5, WIDTH), reduction_type="SUM", storage=storage)
    done = threading.Event()

    def write():
        try:
            return sum(
                bool(acc.apply_grad(gradient(rank, 1), k % 4)) for k in range(40)
            )
        finally:
            done.set()

    def meddle():
        if rank:
            return take_while(acc, lambda: not done.is_set(), 1 + rank)
        chance = random.Random(1)
        while not done.is_set():
            acc.set_global_step(chance.randrange(4))
            assert acc.num_accumulated() <= 80 * size
            time.sleep(0.001)
        return np.zeros((5, WIDTH))

    results = everywhere(in_threads, write, write, meddle)
    total = sum(found for *_, found in results) + at(0, drain, acc)
    accepted = [one + other for one, other, _ in results]
    np.testing.assert_array_equal(total[1 : 1 + size, 0], accepted)
    assert total[0, 0] == sum(accepted)


def test_shape_of_a_round_is_that_of_who_came_first(make, rank, size):
    acc = make(shape=None, capacity=10, reduction_type="SUM")

    def race():
        accepted = 0
        for _ in range(10):
            try:
                accepted += bool(acc.apply_grad(np.ones(1 + rank), ANY_STEP))
            except hpc.InvalidArgumentError:
                continue
        return accepted

    for _ in range(3):
        accepted = everywhere(race)
        total = at(0, acc.take_grad, 1, timeout=WAIT)
        winner = total.size - 1
        assert accepted == [10 if r == winner else 0 for r in range(size)]
        assert (total == 10).all()


def test_same_gradients_give_the_same_bits_in_any_order_of_arrival(make, rank, size):
    # In float32 the order matters: that of ranks, and of each rank's own gradients.
    acc, count = make("float32", (3000,)), np.float32(3 * size)
    chance = random.Random(rank)
    mine = np.random.default_rng(rank).normal(size=(3, 3000)).astype("f")
    mine *= np.float32([[1e4], [1], [1e-4]])
    total = None
    for r in range(size):
        theirs = at(r, lambda: mine)
        sum_of_rank = (theirs[0] + theirs[1]) + theirs[2]
        total = sum_of_rank if total is None else total + sum_of_rank
    # The mean is one true division.
    assert (total / count != total * (1 / count)).any()
    for step in range(6):

        def apply_late(step=step):
            for each in mine:
                time.sleep(chance.random() * 0.002)
                assert acc.apply_grad(each, step)

        everywhere(apply_late)
        same_bits(at(step, acc.take_grad, 3 * size, timeout=WAIT), total / count)
