"""Each strategy makes the updates that plain PyTorch makes with the same gradients."""

from __future__ import annotations

import pytest
import torch

import hpcaccum.torch as hpt

from ..mpi.training import turns
from .torch_training import STRATEGIES, SYNCHRONOUS, Model, Plain, groups, sgd


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
@pytest.mark.parametrize(
    ("kind", "option", "factors"),
    [("SyncReplicas", {"lateness": "inverse"}, [1, 0.5]), ("DropStale", {}, [1, 0])],
)
def test_what_becomes_of_a_late_gradient(kind, option, factors, comm, rank):
    model = Model(start=0)
    # The least quorum, and the least staleness.
    least = 1 if kind == "SyncReplicas" else 0
    with getattr(hpt, kind)(sgd(model), least, comm=comm, **option) as opt:

        def act(_):
            model.backward(rank, 0)
            return opt.step()

        # The second gradient of rank 1 is not late.
        receipts = turns([0, 1, 1], act)
        assert sum(opt.statistics().dropped) == factors.count(0)
    assert [each.factor * each.accepted for each in receipts] == [*factors, 1]
    assert receipts[1].lag == 1


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
