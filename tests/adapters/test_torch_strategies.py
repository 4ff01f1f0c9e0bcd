"""Each strategy makes the updates that plain PyTorch makes with the same gradients."""

from __future__ import annotations

import contextlib
import threading
import time

import numpy as np
import pytest
import torch

import hpcaccum as hpc
import hpcaccum.torch as hpt

from ..mpi.acting import VAIN, until
from ..mpi.support import WAIT, meet
from ..mpi.training import raised, turns
from .torch_training import (
    ONE_SIDED,
    STRATEGIES,
    SYNCHRONOUS,
    Model,
    Plain,
    dedicated,
    groups,
)


class Scaled(torch.optim.Optimizer):
    """An optimizer of a user, which keeps a number that is no option."""

    def __init__(self, params, scale):
        super().__init__(params, {"lr": 0.1})
        self.scale = scale

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=self.scale * group["lr"])


OPTIMIZERS = {
    "Scaled": lambda params: Scaled(params, 2.0),
    "SGD": lambda params: torch.optim.SGD(
        params, 0.1, momentum=0.9, nesterov=True, weight_decay=0.01
    ),
    "foreach": lambda params: torch.optim.SGD(
        params, 0.1, momentum=0.9, nesterov=True, foreach=True
    ),
    "AdamW": lambda params: torch.optim.AdamW(params, 0.1),
    "Adafactor": lambda params: torch.optim.Adafactor(params, 0.1),
    "NAdam": lambda params: torch.optim.NAdam(params, 0.1),
    "Rprop": lambda params: torch.optim.Rprop(params, 0.1),
}


@pytest.mark.ranks(min=2)
def test_a_late_gradient_joins_the_next_update(comm, rank, size):
    model = Model(start=0)
    inner = torch.optim.SGD(model.parameters(), 0.1)
    with hpt.SyncReplicas(inner, 1, lateness="inverse", comm=comm) as opt:

        def act(_):
            model.backward(rank, 0)
            return opt.step()

        receipts = turns([0, 1], act)
    assert [each.factor for each in receipts] == [1.0, 0.5]
    assert all(receipts)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("kind", SYNCHRONOUS)
def test_synchronous_updates_use_the_mean(kind, name, comm, rank, size):
    make = OPTIMIZERS[name]
    model, plain = Model(start=rank), Plain(make, Model(start=0))

    with STRATEGIES[kind](make(groups(model)), comm) as opt:
        for step in range(3):
            model.backward(rank, step)
            assert opt.step()
            assert (model.w.grad is None) == (kind == "SyncReplicas")
            opt.zero_grad()
            plain.update([(each, step) for each in range(size)])
        plain.check(model.values())
        assert opt.global_step == 3
        assert [opt.every(n) for n in (3, 3, 2, 4)] == [True, False, True, False]
        assert opt.statistics().accepted == (3,) * size


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_gradient_is_an_update(name, comm, rank, size):
    make, order = OPTIMIZERS[name], [*range(size), *reversed(range(size))]
    model, plain = Model(start=rank), Plain(make, Model(start=0))

    def act(turn):
        model.backward(rank, turn)
        accepted = bool(opt.step())
        assert model.w.grad is None
        return accepted

    with hpt.DropStale(make(groups(model)), 10**6, comm=comm) as opt:
        assert all(turns(order, act))
        for turn, each in enumerate(order):
            plain.update([(each, turn)])
        center = opt.center([model.w, model.b])
        plain.check({"w": center[0].numpy(), "b": center[1].numpy()})
    plain.check(model.values())


@pytest.mark.ranks(min=2)
def test_a_stale_gradient_is_dropped_and_the_next_one_is_not(comm, rank, size):
    model = Model()
    with hpt.DropStale(torch.optim.SGD(groups(model), 1.0), 0, comm=comm) as opt:
        model.backward(rank, 0)
        receipts = turns([0, 1, 1], lambda turn: _again(opt, model, rank, turn))
        assert [bool(receipt) for receipt in receipts] == [True, False, True]
        assert receipts[1].lag == 1
        assert sum(opt.statistics().dropped) == 1


def _again(opt, model, rank, turn):
    if turn == 2:
        model.backward(rank, turn)
    return opt.step()


@pytest.mark.ranks(min=2)
def test_after_a_dropped_gradient_step_waits_for_parameters_of_use(comm, rank):
    gate = threading.Event()

    class Gated(torch.optim.SGD):
        def step(self, closure=None):
            assert gate.wait(WAIT)
            return super().step(closure)

    model, plain = Model(), Plain(lambda p: torch.optim.SGD(p, 1.0), Model())
    plain.update([(0, 0)])
    with hpt.DropStale(Gated(groups(model), 1.0), 0, comm=comm) as opt:
        model.backward(rank, 0)
        push = threading.Thread(target=opt.step)
        if rank == 0:
            push.start()
            until(lambda: sum(opt.statistics().accepted) == 1)
        meet()
        if rank == 1:
            # Gradients of the parameters that it has would be dropped again.
            assert not opt.step()
            plain.check(model.values())
        if rank == 0:
            until(lambda: sum(opt.statistics().dropped) == 1)
            # A step that does not wait ends now, before the update.
            time.sleep(VAIN)
            gate.set()
            push.join()


def outer(params):
    return torch.optim.SGD(params, 0.7, momentum=0.9, nesterov=True)


@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_local_steps_push_how_far_they_have_led(name, comm, rank, size):
    make, model, center = OPTIMIZERS[name], Model(start=rank), Model(start=0)
    alone = [Plain(make, center) for _ in range(size)]
    rule = outer(center.parameters())
    with hpt.LocalSteps(
        make(groups(model)), outer, 2, quorum=size, comm=comm, module=None
    ) as opt:
        for step in range(4):
            model.backward(rank, step)
            assert opt.step().sent == step % 2
            opt.zero_grad()
            for each, plain in enumerate(alone):
                plain.update([(each, step)])
            if step % 2:
                _update_center(center, rule, [plain.model for plain in alone])
            alone[rank].check(model.values())
        assert opt.global_step == 2
    # The state of the local steps has stayed.
    assert opt.optimizer.state


def _update_center(center, rule, models):
    """Make the outer update, and begin with the center on all ranks."""
    for name, parameter in center.named_parameters():
        moved = [parameter - m.get_parameter(name) for m in models]
        parameter.grad = (sum(moved) / len(moved)).detach()
    rule.step()
    for model in models:
        model.load_state_dict(center.state_dict())


def test_the_saved_state_of_local_steps_is_that_of_the_outer_optimizer(
    comm, rank, size
):
    model = Model(start=rank)
    inner = torch.optim.SGD(groups(model), 0.1)
    with hpt.LocalSteps(inner, outer, 1, quorum=size, comm=comm, module=None) as opt:
        ends = []
        for step in range(2):
            model.backward(rank, step)
            opt.step()
            opt.zero_grad()
            if step == 0:
                saved = opt.state_dict() if rank == 0 else None
                meet()
        ends.append(model.values())
        if rank == 0:
            assert saved["optimizer"] == "SGD"
            assert saved["param_groups"][0]["momentum"] == 0.9
            assert "momentum_buffer" in saved["state"][0]
        opt.load_state_dict(saved)
        model.backward(rank, 1)
        opt.step()
        ends.append(model.values())
        for name, value in ends[0].items():
            assert (ends[1][name] == value).all()


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (lambda params: outer(params[:1]), "all the parameters that it gets"),
        (lambda params: params, "must be one of torch.optim, got list"),
    ],
)
def test_an_outer_optimizer_is_checked_on_all_ranks(comm, rank, size, wrong, text):
    inner = torch.optim.SGD(groups(Model()), 0.1)
    mine = wrong if rank == size - 1 else outer
    error = raised(hpt.LocalSteps, inner, mine, comm=comm, module=None)
    assert text in str(error)


@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_agn_makes_local_steps_and_pushes_their_mean(name, comm, rank, size):
    make, order = OPTIMIZERS[name], [*range(size), *range(size)]
    model, center = Model(start=rank), Plain(make, Model(start=0))
    locals_ = [Plain(make, Model(start=0)) for _ in range(size)]

    def act(turn):
        sent = []
        for step in (2 * turn, 2 * turn + 1):
            model.backward(rank, step)
            sent.append(opt.step().sent)
            opt.zero_grad()
        return sent, model.values()

    with hpt.AGN(make(groups(model)), 2, comm=comm) as opt:
        results = turns(order, act)
        for turn, each in enumerate(order):
            steps = [(each, 2 * turn), (each, 2 * turn + 1)]
            for step in steps:
                locals_[each].update([step])
            center.update(steps)
            locals_[each].model.load_state_dict(center.model.state_dict())
            assert results[turn][0] == [False, True]
            center.check(results[turn][1])
    center.check(model.values())


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("kind", ONE_SIDED)
def test_a_dedicated_host_only_serves(kind, comm, rank, size):
    model, last = Model(start=rank), size - 1
    inner = torch.optim.SGD(groups(model), 1.0)
    with dedicated(kind, inner, comm, last) as opt:
        if rank == last:
            opt.serve()
        else:
            model.backward(rank, 0)
            opt.step()
    assert opt.global_step == (1 if kind == "SyncReplicas" else last)
    values = meet({name: value.tobytes() for name, value in model.values().items()})
    assert all(each == values[0] for each in values)
    assert model.w.ne(last).any()


# Weights: batches of different length train as one process does


LENGTHS = (32, 8, 24, 3)
STEPS = 3


def data(size):
    """Return the samples of each rank."""
    rng = np.random.default_rng(0)
    return [
        torch.tensor(rng.normal(size=(n, 4)), dtype=torch.float64)
        for n in LENGTHS[:size]
    ]


def loss(model, x):
    return ((x @ model.weight.T + model.bias - 1) ** 2).mean()


def linear():
    model = torch.nn.Linear(4, 2, dtype=torch.float64)
    for parameter in model.parameters():
        parameter.data.fill_(0.5)
    return model


def of_one_process(size, make):
    model, x = linear(), torch.cat(data(size))
    opt = make(model.parameters())
    for _ in range(STEPS):
        opt.zero_grad()
        loss(model, x).backward()
        opt.step()
    return model


def in_a_block(opt, model, x):
    with opt.weighted(len(x)):
        loss(model, x).backward()
        opt.step()


def in_a_closure(opt, model, x):
    def closure():
        value = loss(model, x)
        value.backward()
        return value

    assert opt.step(closure, weight=len(x)).loss > 0


def after_no_sync(opt, model, x):
    with opt.no_sync():
        (loss(model, x) / 2).backward()
        (loss(model, x) / 2).backward()
    opt.step(weight=len(x))


def in_step(opt, model, x):
    loss(model, x).backward()
    opt.step(weight=len(x))


@pytest.mark.parametrize("way", [in_a_block, in_a_closure, after_no_sync, in_step])
@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_batches_of_different_length_are_as_one(comm, rank, size, name, way):
    if (name, way) == ("CrossShard", in_step):
        pytest.skip("the backward pass exchanges the gradients")
    model, x = linear(), data(size)[rank]

    def make(parameters):
        return torch.optim.Adam(parameters, 0.1)

    opt = STRATEGIES[name](make(model.parameters()), comm, module=model)
    with opt:
        for _ in range(STEPS):
            opt.zero_grad()
            way(opt, model, x)
    expected = of_one_process(size, make)
    pairs = zip(model.parameters(), expected.parameters(), strict=True)
    for found, wanted in pairs:
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["DropStale", "AGN"])
def test_a_weight_multiplies_the_gradient(comm, size, name):
    model = Model()
    opt = STRATEGIES[name](torch.optim.SGD(model.parameters(), 1.0), comm, module=model)
    with opt:
        for _ in range(2):
            model.zero_grad()
            model.w.sum().backward()
            opt.step(weight=0.25)
    # Two updates of each rank, or one of the mean of two gradients.
    updates = size * (2 if name == "DropStale" else 1)
    np.testing.assert_allclose(model.values()["w"], -0.25 * updates)


@pytest.mark.parametrize("weight", [2, True])
def test_a_weight_comes_too_late_for_gradients_that_were_exchanged(comm, weight):
    model = Model()
    opt = STRATEGIES["CrossShard"](
        torch.optim.SGD(model.parameters(), 1.0), comm, module=model
    )
    with opt:
        model.backward(0, 0)
        error = raised(opt.step, weight=weight)
        assert isinstance(error, hpc.InvalidArgumentError)
        assert "in a block of weighted()" in str(error)
        opt.step(weight=1)


@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_what_is_no_weight_is_an_error(comm, rank, size, name):
    model = Model()
    opt = STRATEGIES[name](torch.optim.SGD(model.parameters(), 1.0), comm, module=model)
    with opt:

        def train(weight):
            with opt.weighted(weight):
                model.backward(rank, 0)
                opt.step()

        error = raised(train, 0 if rank == size - 1 or name != "CrossShard" else 1)
        assert isinstance(error, hpc.InvalidArgumentError)
        assert "weight must be a finite number above 0" in str(error)
        meet()
        opt.zero_grad()
        with contextlib.suppress(hpc.WaitTimeoutError):
            train(1)
        assert opt.global_step == 1
