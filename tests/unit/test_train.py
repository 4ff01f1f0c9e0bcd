"""``hpcaccum train``: its model and data, and what it prints."""

from __future__ import annotations

import argparse
import dataclasses
import re

import numpy as np
import pytest

from hpcaccum.train.data import batches, prepare
from hpcaccum.train.model import MLP, noise_scale
from hpcaccum.train.report import Progress, Record, Result, saved


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


def test_the_noise_scale_is_the_variance_over_the_square_of_the_gradient():
    rng, batch = np.random.default_rng(1), 4

    def gradients(deviation):
        for _ in range(20):
            parts = rng.normal(0.5, deviation / batch**0.5, 20_000)
            yield [parts[:5000].reshape(50, 100), parts[5000:]]

    assert noise_scale(gradients(3.0), batch) == pytest.approx((3 / 0.5) ** 2, rel=0.02)
    assert noise_scale(([np.full(3, sign)] for sign in (1.0, -1.0)), 1) is None


def test_a_model_that_knows_nothing_has_the_loss_of_guessing(mlp):
    for variable in mlp.variables:
        variable.value[...] = 0
    x, y = np.ones((10, 4)), np.zeros(10, int)

    assert mlp.loss_and_gradients(x, y)[0] == pytest.approx(np.log(3))
    assert mlp.evaluate(x, y) == (pytest.approx(np.log(3)), 1)


def test_evaluation_in_pieces_is_the_same(mlp):
    rng = np.random.default_rng(2)
    x, y = rng.standard_normal((10_000, 4)), rng.integers(0, 3, 10_000)
    loss, accuracy = mlp.evaluate(x, y)

    assert loss == pytest.approx(mlp.loss_and_gradients(x, y)[0])
    assert 0 < accuracy < 1


def test_labels_may_be_any_integers():
    data = prepare("", {"x": np.arange(20.0)[:, None], "y": np.repeat([-7, 900], 10)})

    assert data.classes == 2
    assert data.y.tolist() == [0] * 8 + [1] * 8
    assert data.y_test.tolist() == [0, 0, 1, 1]


@pytest.fixture
def data():
    """80 samples to train with."""
    x = np.random.default_rng(2).standard_normal((100, 2))
    return prepare("made", {"x": x, "y": np.arange(100) % 2})


def test_ranks_share_an_epoch_without_gap_or_overlap(data):
    found = [next(batches(data, 20, rank, 4, seed=3))[0] for rank in range(4)]

    assert [len(x) for x in found] == [20] * 4
    assert len(np.unique(np.concatenate(found), axis=0)) == 80


def test_a_batch_may_be_larger_than_a_ranks_share(data):
    x, y = next(batches(data, 500, 1, 4, seed=0))

    assert x.shape == (500, 2)
    assert y.shape == (500,)


@pytest.mark.parametrize("batch", [1, 7, 50])
@pytest.mark.parametrize("start", [0, 1, 5, 29])
def test_batches_continue_where_an_earlier_job_was(data, batch, start):
    whole = batches(data, batch, 1, 3, seed=4)
    for _ in range(start):
        next(whole)
    rest = batches(data, batch, 1, 3, seed=4, start=start)
    for _ in range(20):
        (x1, y1), (x2, y2) = next(whole), next(rest)
        assert np.array_equal(x1, x2)
        assert np.array_equal(y1, y2)


# What it prints: few lines of progress, with the time left; tables


def shown(times, epochs):
    """Return the lines for one record an epoch, at these times."""
    lines = []
    progress = Progress(lines.append, "agn", epochs)
    for epoch, seconds in times:
        progress.show(Record("agn", seconds, epoch, epoch, None, 1.0, 0.5))
    return lines


def test_lines_come_when_the_time_has_doubled():
    lines = shown([(second, float(second)) for second in range(101)], 100)
    epochs = [int(re.search(r"epoch (\d+) of 100", line)[1]) for line in lines]

    assert epochs == [0, 1, 2, 4, 8, 16, 32, 64, 100]
    assert re.match(r"\d\d:\d\d:\d\d agn: epoch 1 of 100, 1.0 s, 99 s left, ", lines[1])
    assert " left" not in lines[0] + lines[-1]


def test_lines_of_a_long_job_come_every_10_minutes():
    lines = shown([(minute, 60.0 * minute) for minute in range(1000)], 2000)
    epochs = [int(re.search(r"epoch (\d+) of", line)[1]) for line in lines]

    assert epochs[:8] == [0, 1, 2, 4, 8, 16, 26, 36]
    assert "996 of 2000" in lines[-1]


@pytest.mark.parametrize(
    ("done", "seconds", "text"),
    [
        (50, 30.0, "30 s left"),
        (1, 60.0, "99 min left"),
        (1, 3600.0, "99.0 h left"),
    ],
)
def test_time_left(done, seconds, text):
    assert text in shown([(0, 0.0), (done, seconds)], 100)[-1]
    # 10 epochs in 10 s; the first 80 were made by another job.
    assert "10 s left" in shown([(80, 0.0), (90, 10.0)], 100)[-1]


def result(**facts):
    known = dict.fromkeys(field.name for field in dataclasses.fields(Result))
    return Result(**(known | {"updates": 9, "target": 9, "resumed_at": 0} | facts))


@pytest.mark.parametrize(
    ("facts", "text"),
    [
        ({}, "checkpoints: s; update 9, from the start"),
        (
            {"resumed_at": 9, "target": 7},
            "checkpoints: s; update 9, resumed at 9; it was complete before: more "
            "--epochs continue it",
        ),
        (
            {"resumed_at": 4, "updates": 6, "stopped": 75},
            "checkpoints: s; update 6, resumed at 4; stopped before 9 (--resume "
            "continues)",
        ),
    ],
)
def test_where_a_run_ended(facts, text):
    assert saved(result(**facts), argparse.Namespace(save="s")) == text
