"""Optimizers with weights: ranks with different amounts of data."""

import numpy as np
import pytest

import hpcaccum as hpc

from ..common import same_bits
from .training import WRAPPERS, gives, meet, raised, variable

STEPS = 3


# Batches of different length


def batches(size):
    """Return the data of each rank: 32 and 8 samples, and maybe 24 and 3."""
    rng = np.random.default_rng(0)
    lengths = [32, 8, 24, 3][:size]
    return [(rng.normal(size=(n, 3)), rng.normal(size=n)) for n in lengths]


def gradient(w, data):
    """Return the gradient of the mean squared error."""
    x, y = data
    return 2 / len(y) * x.T @ (x @ w - y)


def of_one_process(size):
    """Return the weights after some steps with the data of all ranks."""
    parts = batches(size)
    data = [np.concatenate(each) for each in zip(*parts, strict=True)]
    w = np.zeros(3)
    for _ in range(STEPS):
        w -= 0.1 * gradient(w, data)
    return w


@pytest.mark.own_comm
@pytest.mark.parametrize("name", ["CrossShard", "SyncReplicas"])
def test_batches_of_different_length_are_as_one(group, rank, size, name):
    w, data = variable(np.zeros(3)), batches(size)[rank]
    weight = len(data[1])

    def loss():
        return 0.0, [gradient(w.value, data)]

    with WRAPPERS[name](hpc.SGD(0.1), [w], group) as opt:
        for step in range(STEPS):
            if step % 2:
                opt.apply_gradients(opt.compute_gradients(loss, [w]), weight=weight)
            else:
                opt.minimize(loss, var_list=[w], weight=weight)
    np.testing.assert_allclose(w.value, of_one_process(size), 1e-12)


# CrossShard


# What is no weight


@pytest.mark.parametrize("name", WRAPPERS)
def test_what_is_no_weight_is_refused(comm, rank, name):
    w = variable(np.zeros(5))
    with WRAPPERS[name](hpc.SGD(1), [w], comm) as opt:
        opt.initialize([w])
        for weight in (0, np.inf, "1", None, True):
            # With CrossShard, that of one rank is an error on all.
            mine = 2.0 if rank and name == "CrossShard" else weight
            error = raised(opt.minimize, gives(np.ones(5)), weight=mine)
            assert type(error) is hpc.InvalidArgumentError
            assert "weight must be a finite number above 0" in str(error)
        meet()
        assert opt.global_step == sum(opt.statistics().accepted) == 0
        meet()
        if name == "CrossShard":
            opt.minimize(gives(np.ones(5)), weight=2)
            same_bits(w.value, -np.ones(5))


def test_a_local_optimizer_has_no_weight():
    w = variable(np.zeros(5))
    with pytest.raises(TypeError, match="weight"):
        hpc.SGD(1).minimize(gives(np.ones(5)), var_list=[w], weight=2)
