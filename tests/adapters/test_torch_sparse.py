"""Sparse gradients of PyTorch, of which rows travel, against plain PyTorch."""

from __future__ import annotations

import copy
import tracemalloc

import pytest
import torch

import hpcaccum as hpc
import hpcaccum.torch as hpt

from ..mpi.support import meet
from ..mpi.training import check_error, raised, turns
from .torch_rows import (
    OPTIMIZERS,
    ROWS,
    WIDTH,
    Net,
    backward,
    mean_of,
    sparse_mean,
    table,
    words,
)
from .torch_training import (
    STRATEGIES,
    SYNCHRONOUS,
    by_turns,
    check_continues,
    same_everywhere,
)

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")

# Those that send each gradient.
KINDS = ["SyncReplicas", "DropStale"]
INVALID = hpc.InvalidArgumentError


def held(kind, name, module, comm, **options):
    inner = OPTIMIZERS[name](module.parameters())
    return STRATEGIES[kind](inner, comm, sparse=[module.weight], **options)


def check_moved(module, by):
    """Check that a step of rate 1 has changed the table of rank 0 by a mean."""
    wanted = table().weight - torch.tensor(by, dtype=torch.float32)
    torch.testing.assert_close(module.weight, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("kind", ["CrossShard", *KINDS])
def test_updates_are_those_of_plain_pytorch(kind, name, dtype, comm, rank, size):
    if dtype == torch.bfloat16 and name != "SGD":
        pytest.skip("PyTorch has no such update of rows in half precision")
    module, plain = table(rank, dtype), table(0, dtype)
    optimizer = OPTIMIZERS[name](plain.parameters())
    close = {"rtol": 1e-2 if dtype == torch.bfloat16 else 1e-6, "atol": 1e-6}
    options = {} if kind == "CrossShard" else {"capacity": 7}
    with held(kind, name, module, comm, **options) as opt:
        for step in range(3):

            def act(_, step=step):
                backward(module, rank, step)
                if kind == "CrossShard":
                    check_mean(
                        module.weight.grad, sparse_mean(range(size), step, dtype)
                    )
                receipt = opt.step()
                assert (module.weight.grad is None) == (kind != "CrossShard")
                opt.zero_grad()
                return bool(receipt)

            assert all(by_turns(kind, size, act))
            everyone = range(size)
            for ranks in zip(everyone) if kind == "DropStale" else [everyone]:
                plain.weight.grad = sparse_mean(ranks, step, dtype)
                optimizer.step()
            meet()
        assert opt.statistics().accepted == (3,) * size
        center = opt.center(module.weight)
        state = opt.state_dict() if rank == 0 else None
    torch.testing.assert_close(module.weight, plain.weight, **close)
    assert torch.equal(center, module.weight)
    same_everywhere(module.weight)
    # No rank has the last rows.
    assert torch.equal(module.weight[-2:], table(0, dtype).weight[-2:])
    if rank == 0 and name != "SGD":
        for part, expected in optimizer.state[plain.weight].items():
            found = state["state"][0][part]
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
        # Plain PyTorch loads it, too.
        optimizer.load_state_dict(state)


def check_mean(grad, expected):
    assert grad.is_coalesced()
    assert grad.dtype == expected.dtype
    assert torch.equal(grad.indices(), expected.indices())
    close = {"rtol": 1e-2 if grad.dtype == torch.bfloat16 else 1e-6, "atol": 1e-6}
    torch.testing.assert_close(grad.values(), expected.values(), **close)
    same_everywhere(grad.values())


@pytest.mark.parametrize("name", ["Adagrad", "SparseAdam"])
@pytest.mark.parametrize("kind", ["CrossShard", *KINDS])
def test_training_continues_with_the_same_bits(kind, name, comm, rank, size):
    def start(_):
        module = table()
        return held(kind, name, module, comm), module

    def go_on(opt, module, steps):
        for step in steps:

            def act(_, step=step):
                backward(module, rank, step)
                opt.step()
                opt.zero_grad()

            by_turns(kind, size, act)
        meet()

    check_continues(start, go_on, rank)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_agn_makes_local_steps_and_pushes_their_mean(name, comm, rank, size):
    order, module = [*range(size), *range(size)], table(rank)
    center, locals_ = plain(name), [plain(name) for _ in range(size)]

    def act(turn):
        sent = []
        for step in (2 * turn, 2 * turn + 1):
            backward(module, rank, step)
            sent.append(opt.step().sent)
            opt.zero_grad()
        return sent, module.weight.detach().clone()

    with held("AGN", name, module, comm, capacity=7) as opt:
        results = turns(order, act)
    for turn, each in enumerate(order):
        local, local_optimizer = locals_[each]
        mean = torch.zeros(ROWS, WIDTH)
        for step in (2 * turn, 2 * turn + 1):
            local.weight.grad = sparse_mean([each], step)
            mean += local.weight.grad.to_dense() / 2
            local_optimizer.step()
        seen = torch.cat([words(each, 2 * turn), words(each, 2 * turn + 1)]).unique()
        module_, optimizer = center
        module_.weight.grad = torch.sparse_coo_tensor(
            seen[None], mean[seen], mean.shape
        )
        optimizer.step()
        local.load_state_dict(module_.state_dict())
        sent, found = results[turn]
        assert sent == [False, True]
        torch.testing.assert_close(found, module_.weight.detach())
    torch.testing.assert_close(module.weight, center[0].weight)
    same_everywhere(module.weight)


def plain(name):
    """Return a table, and an optimizer of PyTorch for it."""
    module = table()
    return module, OPTIMIZERS[name](module.parameters())


def test_agn_does_not_change_other_rows_later(comm, rank):
    module = table()
    with held("AGN", "SGD", module, comm) as opt:
        backward(module, rank, 0)
        opt.step()
        opt.param_groups[0]["momentum"] = 0.5
        before = module.weight.detach().clone()
        with pytest.raises(INVALID, match="sparse gradients on a server need"):
            opt.step()
        assert torch.equal(module.weight, before)
        opt.param_groups[0]["momentum"] = 0


@pytest.mark.parametrize("kind", KINDS)
def test_an_array_is_an_error_on_its_rank(kind, comm, rank):
    module = table()
    with held(kind, "SGD", module, comm) as opt:
        (module.weight * 2).sum().backward()
        with pytest.raises(INVALID, match="which is in sparse=, must be a sparse"):
            opt.step()
        opt.zero_grad()
        backward(module, rank, 0)
        assert opt.step() or kind == "DropStale"


OTHER = torch.nn.Parameter(torch.zeros(2))
WRONG = {
    "zero": ({"capacity": 0}, INVALID, "capacity must be at least 1"),
    "float": ({"capacity": 1.5}, TypeError, "capacity must be an integer"),
    "alone": ({"capacity": 1, "sparse": []}, INVALID, "capacity needs parameters in"),
    "tensor": ({"sparse": OTHER}, TypeError, "sparse must be a list of"),
    "number": ({"sparse": 3}, TypeError, "list of parameters, got int"),
    "another": ({"sparse": [OTHER]}, INVALID, "sparse[0] is not a parameter of the"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_options_of_one_rank(case, comm, rank, size):
    wrong, error, text = WRONG[case]
    module = table(rank)
    options = {"sparse": [module.weight], **(wrong if rank == size - 1 else {})}
    inner = torch.optim.SGD(module.parameters(), 1.0)
    check_error(
        raised(STRATEGIES["DropStale"], inner, comm, **options), text, kind=error
    )
    assert torch.equal(module.weight, table(rank).weight)


class Sub(torch.optim.SGD):
    """May do anything."""


REFUSED = {
    "momentum": (lambda p: torch.optim.SGD(p, 1.0, momentum=0.5), "SGD with moment"),
    "decay": (lambda p: torch.optim.SGD(p, 1.0, weight_decay=0.5), "with weight_dec"),
    "fused": (lambda p: torch.optim.SGD(p, 1.0, fused=True), "SGD with fused=True"),
    "Adagrad": (
        lambda p: torch.optim.Adagrad(p, 1.0, weight_decay=0.5),
        "not Adagrad with weight_decay=0.5",
    ),
    "Adam": (lambda p: torch.optim.Adam(p, 1.0), "not Adam; make"),
    "RMSprop": (lambda p: torch.optim.RMSprop(p, 1.0), "not RMSprop; make"),
    "subclass": (lambda p: Sub(p, 1.0), "not Sub; make"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_optimizers_that_may_change_other_rows(case, comm, rank):
    make, text = REFUSED[case]
    module = table(rank)
    inner = make(module.parameters())
    found = raised(STRATEGIES["DropStale"], inner, comm, sparse=[module.weight])
    assert isinstance(found, INVALID)
    assert "sparse=True of 'parameter 0' needs SparseAdam, SGD without" in str(found)
    assert text in str(found)
    assert torch.equal(module.weight, table(rank).weight)


@pytest.mark.parametrize("kind", SYNCHRONOUS)
def test_other_groups_are_dense_and_may_have_momentum(kind, comm, rank, size):
    net = Net()
    plain = copy.deepcopy(net)

    def sgd(net):
        last = {"params": net.last.parameters(), "momentum": 0.5}
        return torch.optim.SGD([{"params": [net.bag.weight]}, last], 0.5)

    inner, options = sgd(plain), {"module": net, "sparse": [net.bag.weight]}
    with STRATEGIES[kind](sgd(net), comm, **options) as opt:
        for step in (0, 2, 3):
            net.backward(rank, step)
            opt.step()
            opt.zero_grad()
            inner.zero_grad()
            for each in range(size):
                plain.backward(each, step)
            for parameter in plain.parameters():
                parameter.grad /= size
            inner.step()
    for own, other in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own, other)
        same_everywhere(own)


def test_a_state_with_momentum_is_refused(comm, rank):
    other, module = table(), table()
    inner = torch.optim.SGD(other.parameters(), 1.0, momentum=0.5)
    with hpt.DropStale(inner, 1, comm=comm) as opt:
        state = opt.state_dict() if rank == 0 else None
        meet()
    with held("DropStale", "SGD", module, comm) as opt:
        error = raised(opt.load_state_dict, state)
        check_error(error, "sparse gradients on a server need")
        assert opt.param_groups[0]["momentum"] == 0
        backward(module, rank, 0)
        turns([0], lambda _: opt.step())
        assert opt.global_step == 1


@pytest.mark.parametrize("sync", [True, False])
def test_gradients_of_several_passes_are_added(sync, comm, rank, size):
    module = table()
    with held("CrossShard", "SGD", module, comm) as opt:
        if sync:
            backward(module, rank, 0)
        else:
            with opt.no_sync():
                backward(module, rank, 0)
        backward(module, rank, 2)
        opt.step()
    check_moved(module, mean_of(range(size), 0)[0] + mean_of(range(size), 2)[0])


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
    with held("CrossShard", "SGD", module, comm) as opt:
        tracemalloc.start()
        module(torch.tensor([rank, 7])).sum().backward()
        assert module.weight.grad._nnz() <= 2 * comm.size
        opt.step()
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < module.weight.nbytes / 16


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
    check_moved(module, mean_of(range(size), 0)[0])


def test_what_has_no_rows_is_an_error(comm):
    scale, module = torch.nn.Parameter(torch.ones(())), table()
    inner = torch.optim.SGD([scale], 1.0)
    error = raised(hpt.CrossShard, inner, comm=comm, sparse=[scale])
    assert "'parameter 0' in sparse= is a number, without rows" in str(error)
    with held("CrossShard", "SGD", module, comm) as opt:
        module.weight.grad = torch.ones(ROWS, WIDTH).to_sparse(2)
        error = raised(opt.step)
        assert "must be a sparse tensor of rows, got one with 2 sparse" in str(error)


@pytest.mark.ranks(min=2)
def test_ranks_must_agree_which_are_sparse(comm, rank):
    module = table()
    inner = torch.optim.SGD(module.parameters(), 1.0)
    sparse = [module.weight] if rank else []
    error = raised(hpt.CrossShard, inner, comm=comm, sparse=sparse)
    check_error(error, "sparse must be the same", kind=hpc.DisagreementError)
