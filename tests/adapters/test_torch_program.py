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
from ..mpi.training import check_error, raised
from .torch_training import (
    ONE_SIDED,
    STRATEGIES,
    SYNCHRONOUS,
    Model,
    Plain,
    by_turns,
    dedicated,
    groups,
    same_everywhere,
)


def sgd(model):
    return torch.optim.SGD(groups(model), 0.25)


def train(opt, model, rank, steps=1):
    for step in range(steps):
        model.backward(rank, step)
        opt.step()
        opt.zero_grad()


def clamp(model):
    with torch.no_grad():
        model.w.clamp_(max=0.5)


def load(model):
    model.load_state_dict(
        {n: torch.ones_like(t) for n, t in model.state_dict().items()}
    )


def data(model):
    model.w.data = torch.ones_like(model.w)


def data_in_place(model):
    # In other memory, as PyTorch counts no change of `.data` in place.
    model.w.data = model.w.data.clone().fill_(2.0)


def step_alone(model):
    model.w.grad = torch.ones_like(model.w)
    torch.optim.SGD([model.w], 1.0).step()


CHANGES = {
    "clamp_": clamp,
    "load_state_dict": load,
    "data": data,
    "data in place": data_in_place,
    "init": lambda model: torch.nn.init.normal_(model.w),
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
        check_error(error, "the program has changed the values of 'parameter 0'")
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
    check_error(error, "the program has changed the values")
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


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("kind", ONE_SIDED)
def test_a_dedicated_server_gets_values_while_it_serves(kind, comm, rank, size):
    model = Model()
    with dedicated(kind, sgd(model), comm, 0) as opt:
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
        check_error(raised(STEPS[calls], opt, inner), "call step() of the adapter")
        assert all((model.values()[n] == before[n]).all() for n in before)
        opt.step()
        scheduler.step()
        meet()
    before = model.values()
    model.w.grad = torch.ones_like(model.w)
    inner.step()  # of this rank alone
    np.testing.assert_allclose(model.values()["w"], before["w"] - 0.25)


@pytest.mark.parametrize("kind", STRATEGIES)
@pytest.mark.parametrize("other", ["CrossShard", "DropStale"])
def test_a_parameter_of_two_adapters_is_an_error(kind, other, comm, rank, size):
    model = Model()
    first = STRATEGIES[kind](torch.optim.SGD([model.w], 0.5), comm)
    # On the last rank only: the others get the error, too.
    shared = [model.b, model.w] if rank == size - 1 else [model.b, Model().w]
    error = raised(STRATEGIES[other], torch.optim.SGD(shared, 0.5), comm, module=model)
    check_error(error, f"'w' belongs to another hpcaccum.torch.{kind}")
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
    model, plain = Model(), Model()
    one = STRATEGIES[first](torch.optim.SGD([model.w], 0.5), comm)
    two = STRATEGIES[second](torch.optim.SGD([model.b], 0.25), comm)
    for opt, kind, name in ((one, first, "w"), (two, second, "b")) * 2:

        def act(_, opt=opt, kind=kind, name=name):
            for _ in range(1 + (kind == "AGN")):
                model.backward(0, 0, name)
                opt.step()
                opt.zero_grad()

        by_turns(kind, size, act)
    one.free()
    two.free()
    plain.backward(0, 0)
    for kind, name, rate in ((first, "w", 0.5), (second, "b", 0.25)):
        number = 2 * (1 if kind in SYNCHRONOUS else size)
        expected = -number * rate * getattr(plain, name).grad.numpy()
        np.testing.assert_allclose(model.values()[name], expected, 1e-5)


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("kind", STRATEGIES)
def test_step_hooks(kind, before, comm, rank):
    model, calls, everything = Model(), [], []
    inner = sgd(model)

    def add(optimizer, name):
        def call(which):
            def hook(given, args, kwargs):
                assert given is optimizer
                calls.append((name, which))

            return hook

        optimizer.register_step_pre_hook(call("pre"))
        optimizer.register_step_post_hook(call("post"))

    # One sees the gradients, and may change them; another one sees the new values.
    def clear(*_):
        model.w.grad.zero_()

    values = []
    inner.register_step_pre_hook(clear)
    inner.register_step_post_hook(lambda *_: values.append(model.values()))
    if before:
        add(inner, "inner")
    opt = STRATEGIES[kind](inner, comm)
    if not before:
        add(inner, "inner")
    add(opt, "adapter")
    handles = [
        register_optimizer_step_pre_hook(lambda o, *_: everything.append(o)),
        register_optimizer_step_post_hook(lambda o, *_: everything.append(o)),
    ]
    train(opt, model, rank, 2)
    for handle in handles:
        handle.remove()
    opt.free()
    order = [("adapter", "pre"), ("inner", "pre"), ("inner", "post")]
    assert calls == 2 * [*order, ("adapter", "post")]
    # On the host of a server, those of the copy that updates the center, too.
    seen = [each for each in everything if each in (opt, inner)]
    assert seen == 2 * [opt, inner, inner, opt]
    assert (values[0]["w"] == 0).all()
    assert (values[0]["b"] != 0).any()


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

    def fail(*_):
        raise hpc.InvalidArgumentError("not this one")

    opt.register_load_state_dict_pre_hook(fail)
    assert "not this one" in str(raised(opt.load_state_dict, state))
    opt.free()


# Memory, names and state that it changes


def assign(model):
    for parameter in model.parameters():
        own, parameter.data = parameter.data, torch.zeros_like(parameter)
        parameter.data = own.clone()


def as_vector(model):
    parameters = list(model.parameters())
    flat = torch.nn.utils.parameters_to_vector(parameters).detach().clone()
    torch.nn.utils.vector_to_parameters(flat, parameters)


@pytest.mark.parametrize("kind", STRATEGIES)
def test_modules_of_two_groups_may_have_the_same_names(kind, comm, rank):
    torch.manual_seed(rank)
    first, second = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    inner = torch.optim.SGD(
        [{"params": each.named_parameters()} for each in (first, second)], 0.1
    )
    before = first.weight.detach().clone()
    with STRATEGIES[kind](inner, comm) as opt:
        for _ in range(2):
            second(first(torch.ones(1, 2))).sum().backward()
            opt.step()
            opt.zero_grad()
    assert rank or not torch.equal(first.weight, before)
    same_everywhere(*first.parameters())


@pytest.mark.parametrize("replace", [assign, as_vector])
@pytest.mark.parametrize("kind", SYNCHRONOUS)
def test_memory_of_parameters_may_be_replaced(kind, replace, comm, rank, size):
    model = Model(start=1.0)
    plain = Plain(lambda given: torch.optim.SGD(given, 0.25), model)
    with STRATEGIES[kind](sgd(model), comm) as opt:
        for step in range(4):
            if step == 2:
                replace(model)
            model.backward(rank, step)
            opt.step()
            opt.zero_grad()
            plain.update([(r, step) for r in range(size)])
        if rank == 0:
            replace(model)
            saved = {n: t.numpy() for n, t in opt.state_dict()["parameters"].items()}
            saved = dict(zip(("w", "b"), saved.values(), strict=True))
            plain.check(saved)
        meet()

    plain.check(model.values())


@pytest.mark.parametrize("kind", STRATEGIES)
def test_a_model_that_is_converted_later_is_an_error(kind, comm):
    model = Model()
    opt = STRATEGIES[kind](sgd(model), comm)
    kept = {name: each.data for name, each in model.named_parameters()}
    model.to(torch.bfloat16)
    error = raised(opt.step)
    assert type(error) is hpc.InvalidArgumentError
    assert "has been replaced: it was torch.float32 of (3, 4) on cpu" in str(error)
    assert "is torch.bfloat16 of (3, 4)" in str(error)
    for name, parameter in model.named_parameters():
        parameter.data = kept[name]
    opt.free()


def test_a_model_may_be_converted_at_the_end_if_its_rank_has_the_parameters(comm, rank):
    model = Model()
    with hpt.CrossShard(sgd(model), comm=comm) as opt:
        model.backward(rank, 0)
        opt.step()
        expected = model.values()
        model.to(torch.bfloat16)

    for name, value in model.values().items():
        np.testing.assert_allclose(value, expected[name], 1e-2)


@pytest.mark.ranks(min=2)
def test_buffers_that_differ_later_are_an_error(comm, rank):
    module = torch.nn.BatchNorm1d(2)
    inner = torch.optim.SGD(module.parameters(), 0.1)
    opt = hpt.CrossShard(inner, module=module, comm=comm)
    module.running_mean = torch.zeros(2 + (rank == 1))
    assert type(raised(opt.sync_buffers)) is hpc.DisagreementError
    module.running_mean = torch.zeros(2)
    opt.free()


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("others", ["no state", "the state of another gradient"])
def test_state_that_one_rank_has_loaded_is_an_error(others, comm, rank):
    model = Model()
    inner = torch.optim.Adam(groups(model), 0.1)
    if rank == 0 or others != "no state":
        model.backward(min(rank, 1), 0)
        inner.step()
    error = raised(hpt.CrossShard, inner, comm=comm)

    assert type(error) is hpc.DisagreementError
    text = "state of the optimizer (load it on all ranks) must be the same on all"
    assert text in str(error)
