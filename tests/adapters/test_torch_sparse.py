"""Sparse gradients of PyTorch, of which rows are exchanged, against plain PyTorch."""

from __future__ import annotations

import copy
import tracemalloc

import pytest
import torch

import hpcaccum as hpc
import hpcaccum.torch as hpt

from ..mpi.on_nodes import group_on_nodes  # noqa: F401
from ..mpi.training import raised
from .torch_rows import (
    OPTIMIZERS,
    ROWS,
    WIDTH,
    Net,
    backward,
    check_same,
    mean_of,
    sparse_mean,
    table,
)

# Of sparse tensors that PyTorch's own optimizers make.
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_are_those_of_plain_pytorch(name, dtype, comm, rank, size):
    module, make = table(rank, dtype), OPTIMIZERS[name]
    if dtype == torch.bfloat16 and name != "SGD":
        pytest.skip("PyTorch has no such update of rows in half precision")
    plain = table(0, dtype)
    optimizer = make(plain.parameters())

    with hpt.CrossShard(
        make(module.parameters()), comm=comm, sparse=module.parameters()
    ) as opt:
        for step in range(3):
            backward(module, rank, step)
            grad, expected = module.weight.grad, sparse_mean(range(size), step, dtype)
            assert grad.is_coalesced()
            assert grad.dtype == dtype
            assert torch.equal(grad.indices(), expected.indices())
            close = {"rtol": 1e-2 if dtype == torch.bfloat16 else 1e-6, "atol": 1e-6}
            torch.testing.assert_close(grad.values(), expected.values(), **close)
            check_same(grad.values())
            assert opt.step()
            opt.zero_grad()
            plain.weight.grad = expected
            optimizer.step()
            check_same(module.weight)
            torch.testing.assert_close(module.weight, plain.weight, **close)
        assert opt.statistics().accepted == (3,) * size
    # No rank has the last rows.
    assert torch.equal(module.weight[-2:], table(0, dtype).weight[-2:])


@pytest.mark.ranks(min=2)
def test_ranks_on_several_nodes(group):
    module, plain = table(group.rank), table()
    inner = torch.optim.SGD(module.parameters(), 1.0)
    with hpt.CrossShard(
        inner, comm=group, sparse=[module.weight], wire_dtype="bfloat16"
    ) as opt:
        backward(module, group.rank, 0)
        opt.step()
    # Rows travel in their own dtype.
    mean = torch.tensor(mean_of(range(group.size), 0)[0], dtype=torch.float32)
    torch.testing.assert_close(module.weight, plain.weight - mean)


def test_sparse_and_dense_gradients_in_one_step(comm, rank, size):
    net = Net()
    plain = copy.deepcopy(net)
    sgd = torch.optim.SGD(plain.parameters(), 0.5)
    inner = torch.optim.SGD(net.parameters(), 0.5)
    with hpt.CrossShard(inner, comm=comm, module=net, sparse=[net.bag.weight]) as opt:
        for step in (0, 2):
            net.backward(rank, step)
            opt.step()
            opt.zero_grad()
            for each in range(size):
                plain.backward(each, step)
            for parameter in plain.parameters():
                parameter.grad /= size
            sgd.step()
            sgd.zero_grad()
    for own, other in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own, other)
        check_same(own)


@pytest.mark.parametrize("sync", [True, False])
def test_gradients_of_several_passes_are_added(sync, comm, rank, size):
    module = table()
    inner = torch.optim.SGD(module.parameters(), 1.0)
    with hpt.CrossShard(inner, comm=comm, sparse=[module.weight]) as opt:
        if sync:
            backward(module, rank, 0)
        else:
            with opt.no_sync():
                backward(module, rank, 0)
        backward(module, rank, 2)
        opt.step()
    mean = mean_of(range(size), 0)[0] + mean_of(range(size), 2)[0]
    expected = table().weight - torch.tensor(mean, dtype=torch.float32)
    torch.testing.assert_close(module.weight, expected)


def test_rows_that_are_not_finite_are_dropped(comm, rank, size):
    module = table()
    inner = torch.optim.SGD(module.parameters(), 1.0)
    with hpt.CrossShard(
        inner, comm=comm, sparse=[module.weight], on_nonfinite="drop"
    ) as opt:
        with opt.no_sync():
            backward(module, rank, 0)
        if rank == 0:
            module.weight.grad._values()[3] = torch.nan
        receipt = opt.step()
        assert receipt.nonfinite == (rank == 0)
        assert opt.global_step == (size > 1)
    expected = table().weight.detach()
    if size > 1:
        expected = expected - torch.tensor(mean_of(range(1, size), 0)[0]).float()
    else:
        assert module.weight.grad is None
    torch.testing.assert_close(module.weight.detach(), expected)


@pytest.mark.ranks(min=2)
def test_the_mean_is_over_the_ranks_that_remain(comm, rank, size):
    module = table()
    inner = torch.optim.SGD(module.parameters(), 1.0)
    with hpt.CrossShard(inner, comm=comm, sparse=[module.weight]) as opt:
        if rank == 0:
            opt.leave()
        else:
            backward(module, rank, 0)
            opt.step()
    mean = torch.tensor(mean_of(range(1, size), 0)[0]).float()
    torch.testing.assert_close(module.weight, table().weight - mean)


@pytest.mark.parametrize("name", ["Adagrad", "SparseAdam"])
def test_training_continues_with_the_same_bits(name, comm, rank, tmp_path):
    make, module, other = OPTIMIZERS[name], table(), table()

    def train(opt, module, steps):
        for step in steps:
            backward(module, rank, step)
            opt.step()
            opt.zero_grad()

    with hpt.CrossShard(
        make(module.parameters()), comm=comm, sparse=[module.weight]
    ) as opt:
        train(opt, module, range(2))
        if rank == 0:
            torch.save(opt.state_dict(), tmp_path / "state.pt")
            state = torch.load(tmp_path / "state.pt")
            # Plain PyTorch loads it, too.
            make(table().parameters()).load_state_dict(state)
        train(opt, module, range(2, 4))
    with hpt.CrossShard(
        make(other.parameters()), comm=comm, sparse=[other.weight]
    ) as opt:
        train(opt, other, range(1))
        opt.load_state_dict(state if rank == 0 else None)
        train(opt, other, range(2, 4))
        assert opt.state[other.weight]["step"] == 4
    assert torch.equal(module.weight, other.weight)


def test_momentum_of_rows_cannot_be_saved(comm, rank):
    module = table()
    inner = torch.optim.SGD(module.parameters(), 1.0, momentum=0.5)
    with hpt.CrossShard(inner, comm=comm, sparse=[module.weight]) as opt:
        backward(module, rank, 0)
        opt.step()
        with pytest.raises(hpc.InvalidArgumentError, match="a tensor of torch"):
            opt.state_dict()


def test_memory_grows_with_the_rows(comm, rank):
    module = torch.nn.Embedding(1 << 16, 32, sparse=True)
    nbytes = module.weight.nbytes
    inner = torch.optim.SGD(module.parameters(), 1.0)
    with hpt.CrossShard(inner, comm=comm, sparse=[module.weight]) as opt:
        # Each rank has a 1, and the number of its rows in three digits.
        shapes = [a.shape for a in opt._exchange._shard.reducer.arrays().values()]
        assert shapes == [(comm.size, 4)]
        tracemalloc.start()
        module(torch.tensor([rank, 7])).sum().backward()
        assert module.weight.grad._nnz() <= 2 * comm.size
        opt.step()
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < nbytes / 16


# Errors


@pytest.mark.ranks(min=2)
def test_an_array_of_one_rank_is_an_error_on_all(comm, rank, size):
    module = table()
    inner = torch.optim.SGD(module.parameters(), 1.0)
    with hpt.CrossShard(inner, comm=comm, module=module, sparse=[module.weight]) as opt:
        if rank == size - 1:
            error = raised(lambda: (module.weight * 2).sum().backward())
        else:
            error = raised(backward, module, rank, 0)
        assert isinstance(error, hpc.InvalidArgumentError)
        assert "gradient of 'weight', which is in sparse=, must be a" in str(error)
        assert "torch.strided" in str(error)
        opt.zero_grad()
        backward(module, rank, 0)
        opt.step()
    mean = torch.tensor(mean_of(range(size), 0)[0]).float()
    torch.testing.assert_close(module.weight, table().weight - mean)


def test_a_sparse_tensor_that_has_no_rows(comm):
    module = table()
    inner = torch.optim.SGD(module.parameters(), 1.0)
    with hpt.CrossShard(inner, comm=comm, sparse=[module.weight]) as opt:
        module.weight.grad = torch.ones(ROWS, WIDTH).to_sparse(2)
        error = raised(opt.step)
        assert "must be a sparse tensor of rows, got one with 2 sparse" in str(error)


WRONG = {
    "another": (
        lambda module: [torch.nn.Parameter(torch.zeros(2))],
        hpc.InvalidArgumentError,
        "sparse[0] is not a parameter of the optimizer",
    ),
    "tensor": (lambda module: module.weight, TypeError, "list of parameters"),
    "number": (lambda module: 3, TypeError, "list of parameters, got int"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_options_of_one_rank(case, comm, rank, size):
    make, kind, text = WRONG[case]
    module = table(rank)
    before = module.weight.detach().clone()
    sparse = make(module) if rank == size - 1 else [module.weight]
    inner = torch.optim.SGD(module.parameters(), 1.0)
    error = raised(hpt.CrossShard, inner, comm=comm, sparse=sparse)
    assert isinstance(error, kind)
    assert text in str(error)
    assert torch.equal(module.weight, before)


def test_a_number_has_no_rows(comm):
    scale = torch.nn.Parameter(torch.ones(()))
    error = raised(
        hpt.CrossShard, torch.optim.SGD([scale], 1.0), comm=comm, sparse=[scale]
    )
    assert "'parameter 0' in sparse= is a number, without rows" in str(error)


@pytest.mark.ranks(min=2)
def test_ranks_must_agree_which_are_sparse(comm, rank):
    module = table()
    inner = torch.optim.SGD(module.parameters(), 1.0)
    sparse = [module.weight] if rank else []
    error = raised(hpt.CrossShard, inner, comm=comm, sparse=sparse)
    assert isinstance(error, hpc.DisagreementError)
    assert "sparse must be the same" in str(error)
