"""The model of ``hpcaccum train``, and how its data is prepared."""

from __future__ import annotations

import numpy as np
import pytest

from hpcaccum.train.data import batches, prepare
from hpcaccum.train.model import MLP


@pytest.fixture
def mlp():
    return MLP((4, 6, 5, 3), 0, np.float64)


def test_gradients_are_those_of_finite_differences(mlp):
    rng = np.random.default_rng(1)
    x, y = rng.standard_normal((7, 4)), np.array([0, 1, 2, 0, 1, 2, 2])
    for variable in mlp.variables:  # biases of 0 put dead units on ReLU's kink
        variable.value[...] = rng.standard_normal(variable.shape)
    _, gradients = mlp.loss_and_gradients(x, y)

    assert len(gradients) == len(mlp.variables)
    for variable, gradient in zip(mlp.variables, gradients, strict=True):
        assert gradient.shape == variable.shape
        for index in np.ndindex(variable.shape):
            before = variable.value[index]
            variable.value[index] = before + 1e-6
            above, _ = mlp.loss_and_gradients(x, y)
            variable.value[index] = before - 1e-6
            below, _ = mlp.loss_and_gradients(x, y)
            variable.value[index] = before
            assert gradient[index] == pytest.approx((above - below) / 2e-6, abs=1e-7)


def test_a_model_that_knows_nothing_has_the_loss_of_guessing(mlp):
    for variable in mlp.variables:
        variable.value[...] = 0
    x, y = np.ones((10, 4)), np.zeros(10, int)

    assert mlp.loss_and_gradients(x, y)[0] == pytest.approx(np.log(3))
    assert mlp.evaluate(x, y) == (pytest.approx(np.log(3)), 1)


def test_large_scores_do_not_overflow(mlp):
    for variable in mlp.variables:
        variable.value[...] *= 1e4
    x, y = np.ones((10, 4)), np.zeros(10, int)

    assert np.isfinite(mlp.loss_and_gradients(x, y)[0])


def test_evaluation_in_pieces_is_the_same(mlp):
    rng = np.random.default_rng(2)
    x, y = rng.standard_normal((10_000, 4)), rng.integers(0, 3, 10_000)
    loss, accuracy = mlp.evaluate(x, y)

    assert loss == pytest.approx(mlp.loss_and_gradients(x, y)[0])
    assert 0 < accuracy < 1


def test_the_same_seed_gives_the_same_weights():
    one, two, other = (MLP((4, 3), seed) for seed in (5, 5, 6))

    assert np.array_equal(one.variables[0].value, two.variables[0].value)
    assert not np.array_equal(one.variables[0].value, other.variables[0].value)


def test_labels_may_be_any_integers():
    data = prepare("", {"x": np.arange(20.0)[:, None], "y": np.repeat([-7, 900], 10)})

    assert data.classes == 2
    assert data.y.tolist() == [0] * 8 + [1] * 8
    assert data.y_test.tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize("batch", [1, 7, 50])
@pytest.mark.parametrize("start", [0, 1, 5, 29])
def test_batches_continue_where_an_earlier_job_was(batch, start):
    rng = np.random.default_rng(2)
    x, y = rng.standard_normal((100, 2)), np.arange(100) % 2
    data = prepare("made", {"x": x, "y": y})
    whole = batches(data, batch, 1, 3, seed=4)
    for _ in range(start):
        next(whole)
    rest = batches(data, batch, 1, 3, seed=4, start=start)
    for _ in range(20):
        (x1, y1), (x2, y2) = next(whole), next(rest)
        assert np.array_equal(x1, x2)
        assert np.array_equal(y1, y2)
