"""What a program does beside the adapter: values it sets, steps, hooks, adapters."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

import hpcaccum as hpc
import hpcaccum.torch as hpt

from ..mpi.support import meet
from ..mpi.training import raised, turns
from .torch_training import ONE_SIDED, STRATEGIES, Model, groups


def sgd(model):
    return torch.optim.SGD(groups(model), 0.25)


def train(opt, model, rank, steps=1):
    for step in range(steps):
        model.backward(rank, step)
        opt.step()
        opt.zero_grad()


# Values that a program sets


def clamp(model):
    with torch.no_grad():
        model.w.clamp_(max=0.5)


def load(model):
    model.load_state_dict(
        {n: torch.ones_like(t) for n, t in model.state_dict().items()}
    )


def vector(model):
    torch.nn.utils.vector_to_parameters(torch.ones(17), model.parameters())


def data(model):
    model.w.data = torch.ones_like(model.w)


def data_in_place(model):
    # In other memory, as PyTorch counts no change of `.data` in place.
    model.w.data = model.w.data.clone().fill_(2.0)


def swap(model):
    averages = torch.optim.swa_utils.AveragedModel(model)
    for average, parameter in zip(
        averages.module.parameters(), model.parameters(), strict=True
    ):
        kept = parameter.detach().clone()
        with torch.no_grad():
            parameter.copy_(average)
            average.copy_(kept)


def step_alone(model):
    model.w.grad = torch.ones_like(model.w)
    torch.optim.SGD([model.w], 1.0).step()


CHANGES = {
    "clamp_": clamp,
    "load_state_dict": load,
    "vector_to_parameters": vector,
    "data": data,
    "data in place": data_in_place,
    "init": lambda model: torch.nn.init.normal_(model.w),
    "swap": swap,
    "optimizer": step_alone,
}


# What notices a change is the same in all strategies with a server.
@pytest.mark.parametrize(
    ("kind", "change"),
    [
        *(("SyncReplicas", change) for change in CHANGES),
        *((kind, next(iter(CHANGES))) for kind in ONE_SIDED if kind != "SyncReplicas"),
    ],
)
def test_values_that_the_server_would_replace_are_an_error(kind, change, comm, rank):
    model = Model()
    opt = STRATEGIES[kind](sgd(model), comm)
    for steps in (0, 3):
        train(opt, model, rank, steps)
        model.backward(rank, 9)
        CHANGES[change](model)
        error = raised(opt.step)
        assert type(error) is hpc.InvalidArgumentError
        assert "the program has changed the values of 'parameter 0'" in str(error)
        meet()
        before = opt.global_step, opt.statistics()
        expected = model.values()
        opt.assign()
        assert (opt.global_step, opt.statistics()) == before
        for name, value in meet(expected)[0].items():
            assert (model.values()[name] == value).all()
            center = opt.center(getattr(model, name)).numpy()
            assert (center == value).all()
        meet()
        opt.zero_grad()
        train(opt, model, rank, 2)
    meet()
    # At the end the last values of the server would replace them, too.
    if rank == 0:
        CHANGES[change](model)
    error = raised(opt.free)
    assert type(error) is hpc.InvalidArgumentError
    assert "the program has changed the values" in str(error)
    opt.assign()
    expected = meet(model.values())[0]
    opt.free()
    for name, value in expected.items():
        assert (model.values()[name] == value).all()


def test_values_that_all_ranks_set_alike_stay_with_crossshard(comm, rank):
    model = Model()
    with hpt.CrossShard(sgd(model), comm=comm) as opt:
        for change in CHANGES.values():
            change(model)
            train(opt, model, rank)
        with torch.no_grad():
            model.w.fill_(float(rank))
        opt.assign()
        assert (model.values()["w"] == 0).all()


def closure_of(model, rank, changes):
    def closure():
        model.backward(rank, 0)
        if changes:
            clamp(model)
            model.w.data.add_(0)
        return 1.5

    return closure


@pytest.mark.parametrize("kind", ONE_SIDED)
def test_changes_in_a_closure(kind, comm, rank):
    model = Model()
    with STRATEGIES[kind](sgd(model), comm) as opt:
        assert opt.step(closure_of(model, rank, changes=False)).loss == 1.5
        error = raised(opt.step, closure_of(model, rank, changes=True))
        assert "has changed the values" in str(error)
        opt.assign()


class Parametrized(torch.nn.Module):
    """Layers whose weights are computed, with buffers, and an RNN."""

    def __init__(self):
        super().__init__()
        norm = torch.nn.utils.parametrizations
        self.a = norm.spectral_norm(torch.nn.Linear(4, 4))
        self.b = norm.weight_norm(torch.nn.Linear(4, 4))
        self.c = torch.nn.BatchNorm1d(4)
        self.d = torch.nn.GRU(4, 4, batch_first=True)

    def forward(self, x):
        return self.d(self.c(self.b(self.a(x))).unsqueeze(1))[0]


@pytest.mark.parametrize("kind", ONE_SIDED)
def test_what_pytorch_itself_does_is_no_change(kind, comm, rank, tmp_path):
    torch.manual_seed(0)
    model = Parametrized()
    inner = torch.optim.AdamW(model.parameters(), 0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(inner, 2)
    scaler = torch.amp.GradScaler("cpu")
    with STRATEGIES[kind](inner, comm, module=model) as opt:
        for step in range(6):
            with opt.no_sync():
                scaler.scale(model(torch.randn(8, 4)).square().mean()).backward()
            scaler.scale(model(torch.randn(8, 4)).square().mean()).backward()
            scaler.unscale_(opt)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            assert scaler.step(opt) is not None
            scaler.update()
            scheduler.step()
            opt.zero_grad()
            model.eval()
            model(torch.randn(8, 4))
            model.train()
            # No other values, or other memory with the same ones.
            model.to("cpu").float()
            model.d.flatten_parameters()
            model.d.weight_hh_l0.data = model.d.weight_hh_l0.data.clone()
            opt.center(model.d.weight_hh_l0)
            if step == 2:
                opt.sync_buffers()
            if step == 3 and rank == opt._root:
                opt.state_dict()


@pytest.mark.parametrize("kind", ONE_SIDED)
def test_a_state_that_is_loaded_is_no_change(kind, comm, rank):
    model = Model()
    with STRATEGIES[kind](sgd(model), comm) as opt:
        train(opt, model, rank, 2)
        meet()
        state = opt.state_dict() if rank == 0 else None
        meet()
        clamp(model)
        opt.load_state_dict(state)
        train(opt, model, rank, 2)


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("kind", ONE_SIDED)
def test_a_dedicated_server_gets_values_while_it_serves(kind, comm, rank, size):
    model = Model()
    options = {"dedicated": True}
    if kind == "SyncReplicas":
        opt = hpt.SyncReplicas(sgd(model), size - 1, comm=comm, **options)
    else:
        opt = STRATEGIES[kind](sgd(model), comm, **options)
    with opt:
        if rank == 0:
            opt.serve()
        else:
            train(opt, model, rank, 2)
            with torch.no_grad():
                model.w.fill_(5.0 + rank)
            opt.assign()
            assert (model.values()["w"] == 6.0).all()
            train(opt, model, rank, 2)
            load(model)
            opt.assign()
    for values in meet(model.values()):
        assert (values["w"] == 1.0).all()
        assert (values["b"] == 1.0).all()


# Steps of the optimizer that an adapter holds


STEPS = {
    "step": lambda opt, inner: inner.step(),
    "attribute": lambda opt, inner: opt.optimizer.step(),
    "closure": lambda opt, inner: inner.step(lambda: 1.0),
    "class": lambda opt, inner: type(inner).step(inner),
    "scaler": lambda opt, inner: torch.amp.GradScaler("cpu", enabled=False).step(inner),
    "own closure": lambda opt, inner: opt.step(inner.step),
}


@pytest.mark.parametrize("calls", STEPS)
@pytest.mark.parametrize("kind", ["CrossShard", "AGN"])
def test_the_step_of_the_other_optimizer_is_an_error(kind, calls, comm, rank):
    model = Model()
    inner = sgd(model)
    scheduler = torch.optim.lr_scheduler.StepLR(inner, 5)
    with STRATEGIES[kind](inner, comm) as opt:
        train(opt, model, rank, 2)
        before = model.values()
        model.backward(rank, 0)
        error = raised(STEPS[calls], opt, inner)
        assert type(error) is hpc.InvalidArgumentError
        assert "call step() of the adapter" in str(error)
        assert all((model.values()[n] == before[n]).all() for n in before)
        opt.step()
        scheduler.step()
        meet()
    before = model.values()
    model.w.grad = torch.ones_like(model.w)
    inner.step()  # of this rank alone
    np.testing.assert_allclose(model.values()["w"], before["w"] - 0.25)


# Two adapters


@pytest.mark.parametrize("kind", STRATEGIES)
@pytest.mark.parametrize("other", ["CrossShard", "DropStale"])
def test_a_parameter_of_two_adapters_is_an_error(kind, other, comm, rank, size):
    model = Model()
    first = STRATEGIES[kind](torch.optim.SGD([model.w], 0.5), comm)
    # On the last rank only: the others get the error, too.
    shared = [model.b, model.w] if rank == size - 1 else [model.b, Model().w]
    error = raised(STRATEGIES[other], torch.optim.SGD(shared, 0.5), comm, module=model)
    assert type(error) is hpc.InvalidArgumentError
    assert f"'w' belongs to another hpcaccum.torch.{kind}" in str(error)
    # Nothing is left of the second one.
    second = STRATEGIES[other](torch.optim.SGD([model.b], 0.5), comm)
    first.free()
    second.free()
    with STRATEGIES[other](torch.optim.SGD(model.parameters(), 0.5), comm) as opt:
        train(opt, model, rank)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("CrossShard", "CrossShard"),
        ("AGN", "AGN"),
        *itertools.pairwise([*STRATEGIES, "CrossShard"]),
    ],
)
def test_two_adapters_train_a_model(first, second, comm, rank, size):
    """Each has parameters of its own, and a loss of both, as a GAN has."""
    model = Model()
    one = STRATEGIES[first](torch.optim.SGD([model.w], 0.5), comm)
    two = STRATEGIES[second](torch.optim.SGD([model.b], 0.25), comm)
    each = {"AGN": 2}

    def act(opt, name):
        model.backward(0, 0, name)
        opt.step()
        opt.zero_grad()

    for opt, kind, name in ((one, first, "w"), (two, second, "b")) * 2:
        if kind in ("CrossShard", "SyncReplicas"):
            act(opt, name)
        else:
            turns(
                range(size),
                lambda _, o=opt, k=kind, n=name: [
                    act(o, n) for _ in range(each.get(k, 1))
                ],
            )
    one.free()
    two.free()
    plain = Model()
    plain.backward(0, 0)
    for kind, name, rate in ((first, "w", 0.5), (second, "b", 0.25)):
        number = 2 * (1 if kind in ("CrossShard", "SyncReplicas") else size)
        expected = -number * rate * getattr(plain, name).grad.numpy()
        np.testing.assert_allclose(model.values()[name], expected, 1e-5)


# Hooks


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("kind", STRATEGIES)
def test_step_hooks(kind, before, comm, rank):
    model, calls = Model(), []
    inner = sgd(model)

    def add(optimizer, name):
        def call(which):
            def hook(given, args, kwargs):
                assert given is optimizer
                calls.append((name, which, given.param_groups[0]["lr"]))

            return hook

        optimizer.register_step_pre_hook(call("pre"))
        optimizer.register_step_post_hook(call("post"))

    if before:
        add(inner, "inner")
    opt = STRATEGIES[kind](inner, comm)
    if not before:
        add(inner, "inner")
    add(opt, "adapter")
    train(opt, model, rank, 2)
    opt.free()
    order = [
        ("adapter", "pre"),
        ("inner", "pre"),
        ("inner", "post"),
        ("adapter", "post"),
    ]
    assert [each[:2] for each in calls] == 2 * order


@pytest.mark.parametrize("kind", STRATEGIES)
def test_a_hook_sees_the_gradients_and_then_the_new_values(kind, comm, rank):
    model, seen = Model(), []
    inner = sgd(model)

    def pre(optimizer, args, kwargs):
        seen.append(model.values())
        model.w.grad.zero_()

    inner.register_step_pre_hook(pre)
    inner.register_step_post_hook(lambda *_: seen.append(model.values()))
    with STRATEGIES[kind](inner, comm) as opt:
        train(opt, model, rank)
    assert (seen[0]["w"] == 0).all()
    assert (seen[1]["w"] == 0).all()
    assert (seen[1]["b"] != 0).any()


@pytest.mark.parametrize("kind", ONE_SIDED)
def test_a_hook_that_changes_values_is_found_at_the_next_step(kind, comm, rank):
    for owner in ("inner", "adapter"):
        model = Model()
        inner = sgd(model)
        opt = STRATEGIES[kind](inner, comm)
        chosen = inner if owner == "inner" else opt
        handle = chosen.register_step_post_hook(lambda *_, m=model: clamp(m))
        train(opt, model, rank)
        model.backward(rank, 1)
        assert "has changed the values" in str(raised(opt.step))
        handle.remove()
        opt.assign()
        opt.free()


@pytest.mark.parametrize("kind", STRATEGIES)
def test_global_hooks_see_the_adapter_and_its_optimizer(kind, comm, rank):
    model, calls = Model(), []
    inner = sgd(model)
    opt = STRATEGIES[kind](inner, comm)
    handles = [
        register_optimizer_step_pre_hook(lambda o, *_: calls.append(o)),
        register_optimizer_step_post_hook(lambda o, *_: calls.append(o)),
    ]
    train(opt, model, rank)
    for handle in handles:
        handle.remove()
    opt.free()
    # On the host of a server, those of the copy that updates the center, too.
    assert [o for o in calls if o in (opt, inner)] == [opt, inner, inner, opt]


@pytest.mark.parametrize("kind", STRATEGIES)
def test_hooks_of_states(kind, comm, rank):
    model, calls = Model(), []
    inner = sgd(model)
    opt = STRATEGIES[kind](inner, comm)
    for name, owner in (("inner", inner), ("adapter", opt)):

        def note(what, name=name, owner=owner):
            def hook(given, *_):
                assert given is owner
                calls.append((name, what))

            return hook

        def more(given, state, name=name):
            return {**state, name: len(state)}

        owner.register_state_dict_pre_hook(note("save"))
        owner.register_state_dict_post_hook(note("saved"))
        owner.register_state_dict_post_hook(more)
        owner.register_load_state_dict_pre_hook(note("load"))
        owner.register_load_state_dict_pre_hook(
            lambda given, state, name=name: {k: state[k] for k in state if k != name}
        )
        owner.register_load_state_dict_post_hook(note("loaded"))
    train(opt, model, rank)
    meet()
    state = opt.state_dict() if rank == 0 else None
    meet()
    if rank == 0:
        assert {"inner", "adapter"} <= state.keys()
        assert [each for each in calls if each[1].startswith("save")] == [
            ("inner", "save"),
            ("adapter", "save"),
            ("inner", "saved"),
            ("adapter", "saved"),
        ]
        kept = dict(state)
    calls.clear()
    opt.load_state_dict(state)
    loaded = [("inner", "loaded"), ("adapter", "loaded")]
    load = [("inner", "load"), ("adapter", "load")]
    assert calls == (load if rank == 0 else []) + loaded
    if rank == 0:
        assert state.keys() == kept.keys()
    opt.free()


@pytest.mark.parametrize("kind", STRATEGIES)
def test_a_hook_of_a_state_that_fails_does_so_on_all_ranks(kind, comm, rank):
    opt = STRATEGIES[kind](sgd(Model()), comm)
    state = opt.state_dict() if rank == 0 else None

    def fail(*_):
        raise hpc.InvalidArgumentError("not this one")

    handle = opt.register_load_state_dict_pre_hook(fail)
    assert "not this one" in str(raised(opt.load_state_dict, state))
    handle.remove()
    opt.free()
