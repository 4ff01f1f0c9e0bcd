"""Every strategy and storage against a model in plain NumPy, with a large array.

Gradients are small whole numbers: their sums are exact in any order, so results must
have the bits of the model wherever the ranks are.
"""

from __future__ import annotations

import numpy as np
import pytest

import hpcaccum as hpc

from ..common import same_bits
from .support import WAIT, meet
from .training import WRAPPERS

SHAPES = {"scalar": (), "empty": (0, 3), "matrix": (7, 5), "large": (150_000,)}
CALLS = 4


def drawn(rank, call):
    """Return the gradients of a rank, the same on every rank."""
    random = np.random.default_rng([rank, call])
    return {
        name: np.asarray(random.integers(-8, 9, shape), np.float32)
        for name, shape in SHAPES.items()
    }


def mean(parts):
    return sum(parts) / np.float32(len(parts))


class Model:
    """Momentum(0.25, 0.5), of which only additions round."""

    def __init__(self):
        self.values = {k: np.ones(s, np.float32) for k, s in SHAPES.items()}
        self.momentum = {k: np.zeros(s, np.float32) for k, s in SHAPES.items()}

    def update(self, gradients):
        """Make one update with the mean of these gradients."""
        for name in SHAPES:
            new = mean([gradient[name] for gradient in gradients])
            self.momentum[name] = np.float32(0.5) * self.momentum[name] + new
            self.values[name] -= np.float32(0.25) * self.momentum[name]

    def check(self, found):
        for name, array in zip(SHAPES, found, strict=True):
            same_bits(array, self.values[name])


@pytest.fixture
def model():
    return Model()


@pytest.fixture
def train(comm, rank):
    """An optimizer that has gradients of this rank; ends with the final variables."""
    return lambda wrap, **options: Training(comm, rank, wrap, options)


class Training:
    """The optimizer of one test and its variables."""

    def __init__(self, comm, rank, wrap, options):
        self.rank = rank
        self.variables = [
            hpc.Variable(np.ones(shape, np.float32), name)
            for name, shape in SHAPES.items()
        ]
        inner = hpc.Momentum(0.25, 0.5)
        self.opt = wrap(inner, self.variables, comm, **options)

    def __enter__(self):
        self.opt.__enter__()
        self.opt.initialize(self.variables)
        return self

    def __exit__(self, *exception):
        self.opt.__exit__(*exception)

    def step(self, call):
        loss = 0.0, drawn(self.rank, call)
        return self.opt.minimize(lambda: loss, var_list=self.variables)

    def values(self):
        return [variable.value for variable in self.variables]


@pytest.mark.parametrize("kind", ["CrossShard", "SyncReplicas"])
def test_updates_with_the_mean_of_all_ranks(train, model, size, kind):
    with train(WRAPPERS[kind]) as training:
        for call in range(CALLS):
            training.step(call)
            model.update([drawn(r, call) for r in range(size)])
            model.check(training.values())


def quorum_of(quorum):
    return lambda inner, _, comm: hpc.SyncReplicasOptimizer(inner, quorum, comm=comm)


@pytest.mark.ranks(min=2)
def test_updates_with_the_mean_of_a_quorum(train, model, rank, size):
    quorum = size // 2
    with train(quorum_of(quorum)) as training:
        for call in range(CALLS):
            chosen = [(call + n) % size for n in range(quorum)]
            while rank in chosen and not training.step(call):
                pass  # it was computed with old parameters
            meet()
            model.update([drawn(r, call) for r in chosen])
            model.check(training.opt.center(training.variables))
            meet()  # no update before all have compared

    model.check(training.values())


@pytest.mark.parametrize("staleness", [1, 100])
def test_updates_with_each_gradient_in_time(train, model, rank, staleness):
    def wrap(inner, _, comm):
        return hpc.DropStaleGradientOptimizer(inner, staleness, comm=comm)

    with train(wrap) as training:
        receipts = meet([training.step(call) for call in range(CALLS)])

    for r, call in in_order(receipts):
        model.update([drawn(r, call)])
    model.check(training.values())


def test_updates_with_the_mean_of_each_period(train, model):
    with train(WRAPPERS["AGN"]) as training:
        receipts = meet([training.step(call) for call in range(CALLS)])

    for r, call in in_order(receipts):
        model.update([drawn(r, call - 1), drawn(r, call)])
    model.check(training.values())


def in_order(receipts):
    """Return the rank and the call of each update, in the order of admission."""
    updates = [
        (receipt.global_step, rank, call)
        for rank, of_rank in enumerate(receipts)
        for call, receipt in enumerate(of_rank)
        if receipt and receipt.sent
    ]
    assert sorted(step for step, _, _ in updates) == list(range(len(updates)))
    return [(rank, call) for _, rank, call in sorted(updates)]


@pytest.mark.parametrize("taker", [0, -1], ids=["first", "last"])
# Open MPI may need a second for each accumulate of more on another node.
@pytest.mark.parametrize(("storage", "length"), [("slots", 150_000), ("sum", 5_000)])
def test_takes_the_mean_of_all_gradients(comm, rank, size, storage, length, taker):
    def part(rank, step):
        return drawn(rank, step)["large"][:length]

    options = {"storage": storage, "comm": comm}
    with hpc.ConditionalAccumulator("float32", (length,), **options) as acc:
        for step in range(CALLS):
            gradient = part(rank, step)
            if step % 2:
                slot = acc.slot(timeout=WAIT)
                slot[...] = gradient
                gradient = slot
            assert acc.apply_grad(gradient, step)
            if rank == taker % size:
                found = acc.take_grad(size, timeout=WAIT)
                same_bits(found, mean([part(r, step) for r in range(size)]))
            meet()
