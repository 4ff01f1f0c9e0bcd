"""The replay of a run: it has the bits of plain expressions, and finds differences."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from hpcaccum import Momentum, Variable
from hpcaccum.train.data import batches, prepare
from hpcaccum.train.model import MLP
from hpcaccum.train.recording import Gradient, Recording, data_digest, digests
from hpcaccum.train.replay import DifferenceError, Replay, mean

from ..common import same_bits

# Updates of one gradient each: the rank, its gradient, and the step of the parameters.
# Gradient 1 of rank 1 was dropped.
ADMITTED = [(0, 0, 0), (1, 0, 0), (0, 1, 1), (1, 2, 2), (0, 2, 3), (1, 3, 5)]


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(0)
    y = np.arange(100) % 3
    return prepare("made", rng.standard_normal((100, 4)) + y[:, None], y)


@pytest.fixture(scope="module")
def recording(data):
    """A run of drop-stale, made by plain calls."""
    model, rule = MLP((4, 5, 3), 7, Variable), Momentum(0.3, 0.9)
    rule.initialize(model.variables)
    initial = [var.value.copy() for var in model.variables]
    steps, updates = [initial], []
    endless = [batches(data, 8, rank, 2, 7) for rank in range(2)]
    own = [[next(each) for _ in range(4)] for each in endless]
    for update, (rank, number, step) in enumerate(ADMITTED, 1):
        set_all(model, steps[step])
        loss, grads = model.loss_and_gradients(*own[rank][number])
        set_all(model, steps[-1])
        rule.apply_gradients(list(zip(grads, model.variables, strict=True)))
        steps.append([var.value.copy() for var in model.variables])
        updates.append((update, [Gradient(rank, number, step, loss)]))
    return Recording(
        strategy="drop-stale",
        optimizer="momentum",
        rate=0.3,
        batch=8,
        period=10,
        seed=7,
        nodes=[[0, 1]],
        widths=[4, 5, 3],
        data=None,
        data_digest=data_digest(data),
        arithmetic={},
        updates=updates,
        digests=digests(rule.snapshot()),
    )


def set_all(model, values):
    for var, value in zip(model.variables, values, strict=True):
        var.value[...] = value


def repeat(recording, data):
    replay = Replay(recording, data)
    replay.run(len(recording.updates))
    replay.compare()


def test_a_replay_has_the_bits_of_the_run(recording, data):
    repeat(recording, data)


def test_a_replay_may_stop_earlier(recording, data):
    replay = Replay(recording, data)
    replay.run(0)

    for var, other in zip(
        replay.center.model.variables,
        MLP((4, 5, 3), 7, Variable).variables,
        strict=True,
    ):
        same_bits(var.value, other.value)


def swapped(updates, place):
    (one, first), (two, second) = updates[place : place + 2]
    return [*updates[:place], (one, second), (two, first), *updates[place + 2 :]]


def with_gradient(updates, place, **change):
    update, [gradient] = updates[place]
    changed = (update, [gradient._replace(**change)])
    return [*updates[:place], changed, *updates[place + 1 :]]


CHANGES = {
    "lines are swapped": (
        lambda u: [u[0], u[2], u[1], *u[3:]],
        "the record has update 3 in the place of update 2",
    ),
    "a line is missing": (
        lambda u: [*u[:2], *u[3:]],
        "the record has update 4 in the place of update 3",
    ),
    "gradients are swapped": (
        lambda u: swapped(u, 3),
        "at step 5, gradient 3 of rank 1 has the loss",
    ),
    "a gradient comes too early": (
        lambda u: swapped(u, 2),
        "update 5 cannot have gradient 2 of rank 0, computed at step 3: update 4 has "
        "its gradient 1",
    ),
    "a loss": (
        lambda u: with_gradient(u, 0, loss=0.5),
        "at step 0, gradient 0 of rank 0 has the loss",
    ),
    "a later step": (
        lambda u: with_gradient(u, 3, step=4),
        "update 4 cannot have gradient 2 of rank 1: it was computed at step 4",
    ),
    "an earlier step": (
        lambda u: with_gradient(u, 4, step=2),
        "update 5 cannot have gradient 2 of rank 0, computed at step 2: update 3 has "
        "its gradient 1",
    ),
    "an earlier number": (
        lambda u: with_gradient(u, 3, number=0),
        "update 4 cannot have gradient 0 of rank 1",
    ),
    "another batch": (
        lambda u: with_gradient(u, 3, number=1),
        "at step 2, gradient 1 of rank 1 has the loss",
    ),
    "the end": (lambda u: u[:-1], "weights0 differs after the last update"),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_a_replay_names_the_first_difference(recording, data, kind):
    change, message = CHANGES[kind]
    changed = dataclasses.replace(recording, updates=change(recording.updates))
    with pytest.raises(DifferenceError) as caught:
        repeat(changed, data)

    assert message in str(caught.value)


def test_the_mean_is_that_of_sums_of_nodes():
    rng = np.random.default_rng(1)
    vectors = {rank: rng.standard_normal(1000).astype("f4") for rank in (0, 1, 3, 4)}
    a, b, c, d = vectors.values()

    same_bits(mean(vectors, [[0, 1, 2], [3, 4]]), ((a + b) + (c + d)) / np.float32(4))
    same_bits(mean(vectors, [range(5)]), (((a + b) + c) + d) / np.float32(4))
    assert not np.array_equal(
        mean(vectors, [range(5)]), mean(vectors, [[0, 1], [3, 4]])
    )
