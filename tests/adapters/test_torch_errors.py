"""Bad input to the adapter of PyTorch: the same error on every rank."""

from __future__ import annotations

import pytest
import torch

import hpcaccum as hpc
import hpcaccum.torch as hpt

from ..mpi.training import check_error, raised
from .torch_training import STRATEGIES, Model, gradient, refused, sgd

WRONG = {
    "closure": (lambda: torch.optim.LBFGS(Model().parameters()), "LBFGS calls a"),
    "sparse": (
        lambda: torch.optim.SparseAdam(Model().parameters()),
        "SparseAdam needs sparse gradients, and 'parameter 0' has none",
    ),
    "several devices": (
        lambda: torch.optim.SGD(
            [Model().w, torch.nn.Parameter(torch.zeros(2, device="meta"))], 1.0
        ),
        "on one device, they are on cpu, meta",
    ),
    "device": (
        lambda: sgd(torch.nn.Linear(2, 2, device="meta")),
        "on meta; only tensors in CPU memory or on a CUDA",
    ),
    "twice": (
        lambda: torch.optim.SGD([Model().w, *[Model().b] * 2], 1.0),
        "the optimizer has 'parameter 1' twice",
    ),
    "dtype": (
        lambda: sgd(torch.nn.Linear(2, 2, dtype=torch.complex64)),
        "'parameter 0' has dtype torch.complex64",
    ),
    "kind": (lambda: hpc.SGD(1.0), "must be one of torch.optim, got SGD"),
}


@pytest.mark.filterwarnings("ignore:.*duplicate parameters")
@pytest.mark.parametrize("kind", STRATEGIES)
@pytest.mark.parametrize("case", WRONG)
def test_an_optimizer_that_cannot_be_used(case, kind, comm, rank):
    make, message = WRONG[case]
    # On one rank only: the others get the error, too.
    error = refused(STRATEGIES[kind], make() if rank == 0 else sgd(Model()), comm)
    assert message in str(error)
    assert rank == 0 or str(error).startswith(f"hpcaccum.torch.{kind}: rank 0: ")


DIFFERENT = {
    "number": (lambda model: torch.optim.SGD([model.w], 1.0), {}),
    "shape": (lambda model: torch.optim.SGD([model.w.T.detach(), model.b], 1.0), {}),
    "dtype": (lambda model: sgd(model.double()), {}),
    "optimizer": (lambda model: torch.optim.Adam(model.parameters(), 1.0), {}),
    "buffers": (sgd, {"more": torch.zeros(1)}),
}


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("kind", ["CrossShard", "DropStale"])
@pytest.mark.parametrize("case", DIFFERENT)
def test_optimizers_that_differ_between_ranks(case, kind, comm, rank):
    make, buffers = DIFFERENT[case] if rank == 1 else (sgd, {})
    model = Model()
    for name, buffer in buffers.items():
        model.register_buffer(name, buffer)
    error = refused(STRATEGIES[kind], make(model), comm, module=model)
    check_error(error, "must be the same on all", kind=hpc.DisagreementError)


def test_bad_options(comm):
    inner = sgd(Model())
    for options, message in (
        ({"module": "model"}, "module must be a torch.nn.Module, got str"),
        ({"buffers": "sum"}, "buffers must be one of"),
    ):
        assert message in str(refused(hpt.CrossShard, inner, comm=comm, **options))
    # What only the optimizer of hpcaccum has, and what nothing has.
    for name in ("use_locking", "name", "bogus"):
        with pytest.raises(TypeError, match=f"DropStale got an unexp.*'{name}'"):
            hpt.DropStale(inner, comm=comm, **{name: True})


def test_a_buffer_that_numpy_cannot_hold_changes_nothing(comm, rank):
    module = Model()
    module.register_buffer("first", torch.full((1,), float(rank)))
    module.register_buffer("small", torch.zeros(1).to(torch.float8_e4m3fn))
    before = [each.clone() for each in module.parameters()]
    error = refused(hpt.DropStale, sgd(module), 0, module=module, comm=comm)
    assert isinstance(error, TypeError)
    assert module.first == rank
    assert all(map(torch.equal, before, module.parameters()))


def test_an_adapter_is_not_wrapped_again(comm):
    with hpt.DropStale(sgd(Model()), 0, comm=comm) as opt:
        assert "already exchanges gradients" in str(refused(hpt.AGN, opt, comm=comm))
        with pytest.raises(hpc.InvalidArgumentError, match="cannot be added later"):
            opt.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})


@pytest.mark.parametrize("kind", STRATEGIES)
def test_sparse_gradients(kind, comm, rank):
    module = torch.nn.Embedding(4, 2, sparse=True)

    def train():
        module(torch.tensor([rank])).sum().backward()
        opt.step()

    with STRATEGIES[kind](sgd(module), comm) as opt:
        check_error(raised(train), "gradient of 'parameter 0' is sparse")
        opt.zero_grad()


@pytest.mark.ranks(min=2)
def test_a_sparse_gradient_of_one_rank_is_an_error_on_all(comm, rank):
    table, model = torch.nn.Embedding(4, 2, sparse=rank == 1), Model()
    inner = torch.optim.SGD([*table.parameters(), *model.parameters()], 1.0)
    with hpt.CrossShard(inner, comm=comm) as opt:
        # The gradient of the model comes first.
        loss = table(torch.tensor([rank])).sum() + model.w.sum()
        check_error(raised(loss.backward), "gradient of 'parameter 0' is sparse")
        opt.zero_grad()
        with opt.no_sync():
            model.backward(0, 0)
        opt.step()
    assert torch.equal(model.w, -gradient("w", model.w, 0, 0))


@pytest.mark.ranks(min=2)
def test_a_state_is_refused_after_a_rank_has_left(comm, rank, size):
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), 0.5, momentum=0.9)
    with hpt.CrossShard(optimizer, comm=comm) as opt:
        model.backward(rank, 0)
        opt.step()
        state = opt.state_dict()
        if rank == size - 1:
            opt.leave()
            with pytest.raises(hpc.InvalidArgumentError, match="has left"):
                model.backward(rank, 1)
        else:
            model.backward(rank, 1)
            opt.step()
        optimizer.param_groups[0]["lr"] = 0.25
        momentum = optimizer.state[model.w]["momentum_buffer"]
        before = momentum.clone()
        error = raised(opt.load_state_dict, state)
        after = optimizer.state[model.w]["momentum_buffer"]
        check_error(error, "has left")
        assert optimizer.param_groups[0]["lr"] == 0.25
        assert torch.equal(after, before)


def test_after_free(comm, rank):
    model = Model()
    opt = hpt.CrossShard(sgd(model), comm=comm)
    model.backward(rank, 0)
    opt.step()
    opt.free()
    opt.free()
    assert opt.freed
    assert opt.global_step == 1
    assert torch.equal(opt.center(model.w), model.w)
    opt.zero_grad()
    # Nothing is exchanged any more.
    model.backward(rank, 0)
    for call in (opt.step, opt.sync_buffers, lambda: opt.load_state_dict({})):
        with pytest.raises(hpc.FreedError, match="was freed"):
            call()


@pytest.mark.parametrize("kind", STRATEGIES)
def test_parameters_added_to_the_optimizer_that_is_held(kind, comm, rank):
    model = Model()
    inner = torch.optim.SGD([model.w], 1.0)
    with STRATEGIES[kind](inner, comm) as opt:
        inner.add_param_group({"params": [model.b]})
        model.backward(rank, 0)
        check_error(raised(opt.step), "parameters cannot be added later")
        del inner.param_groups[1]
