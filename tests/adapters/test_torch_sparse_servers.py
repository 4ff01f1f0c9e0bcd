"""Sparse gradients of PyTorch on a server, of which rows travel: as plain PyTorch."""

from __future__ import annotations

import copy

import pytest
import torch

import hpcaccum as hpc
import hpcaccum.torch as hpt
from hpcaccum.torch.rule import TorchRule

from ..mpi.on_nodes import group_on_nodes  # noqa: F401
from ..mpi.support import meet
from ..mpi.training import (
    copies_fixture,  # noqa: F401
    raised,
    turns,
)
from .torch_rows import (
    OPTIMIZERS,
    ROWS,
    WIDTH,
    Net,
    backward,
    check_same,
    sparse_mean,
    table,
    words,
)
from .torch_training import ONE_SIDED, STRATEGIES

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")

# Those that send each gradient.
KINDS = ["SyncReplicas", "DropStale"]
INVALID = hpc.InvalidArgumentError


def held(kind, name, module, comm, **options):
    inner = OPTIMIZERS[name](module.parameters())
    return STRATEGIES[kind](inner, comm, sparse=[module.weight], **options)


def by_turns(kind, size, act):
    """Call ``act`` on all ranks; on one after the other if each call is an update."""
    if kind == "SyncReplicas":
        return [act(0)]
    return turns(range(size), act)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("kind", KINDS)
def test_updates_are_those_of_plain_pytorch(kind, name, dtype, comm, rank, size):
    if dtype == torch.bfloat16 and name != "SGD":
        pytest.skip("PyTorch has no such update of rows in half precision")
    module, plain = table(rank, dtype), table(0, dtype)
    optimizer = OPTIMIZERS[name](plain.parameters())
    with held(kind, name, module, comm, capacity=7) as opt:
        for step in range(3):

            def act(_, step=step):
                backward(module, rank, step)
                receipt = opt.step()
                assert module.weight.grad is None
                return bool(receipt)

            assert all(by_turns(kind, size, act))
            everyone = range(size)
            for ranks in [everyone] if kind == "SyncReplicas" else zip(everyone):
                plain.weight.grad = sparse_mean(ranks, step, dtype)
                optimizer.step()
            meet()
        center = opt.center(module.weight)
        state = opt.state_dict()["state"] if rank == 0 else None
    close = {"rtol": 1e-2 if dtype == torch.bfloat16 else 1e-6, "atol": 1e-6}
    torch.testing.assert_close(module.weight, plain.weight, **close)
    assert torch.equal(center, module.weight)
    check_same(module.weight)
    # No rank has the last rows.
    assert torch.equal(module.weight[-2:], table(0, dtype).weight[-2:])
    if rank == 0 and name != "SGD":
        for part, expected in optimizer.state[plain.weight].items():
            torch.testing.assert_close(state[0][part], expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["Adagrad", "SparseAdam"])
@pytest.mark.parametrize("kind", KINDS)
def test_training_continues_with_the_same_bits(kind, name, comm, rank, size, tmp_path):
    module, other = table(), table()

    def train(opt, module, steps):
        for step in steps:

            def act(_, step=step):
                backward(module, rank, step)
                opt.step()

            by_turns(kind, size, act)
        meet()

    with held(kind, name, module, comm) as opt:
        train(opt, module, range(2))
        if rank == 0:
            torch.save(opt.state_dict(), tmp_path / "state.pt")
            state = torch.load(tmp_path / "state.pt")
            # Plain PyTorch loads it, too.
            OPTIMIZERS[name](table().parameters()).load_state_dict(state)
        meet()
        train(opt, module, range(2, 4))
    with held(kind, name, other, comm) as opt:
        train(opt, other, range(1))
        opt.load_state_dict(state if rank == 0 else None)
        train(opt, other, range(2, 4))
    assert torch.equal(module.weight, other.weight)


# AGN


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
    check_same(module.weight)


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


# Errors


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


WRONG = {
    "zero": ({"capacity": 0}, INVALID, "capacity must be at least 1"),
    "float": ({"capacity": 1.5}, TypeError, "capacity must be an integer"),
    "alone": ({"capacity": 1, "sparse": []}, INVALID, "capacity needs parameters in"),
    "tensor": ({"sparse": torch.zeros(2)}, TypeError, "sparse must be a list of"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_options_of_one_rank(case, comm, rank, size):
    wrong, error, text = WRONG[case]
    module = table(rank)
    options = {"sparse": [module.weight], **(wrong if rank == size - 1 else {})}
    inner = torch.optim.SGD(module.parameters(), 1.0)
    found = raised(STRATEGIES["DropStale"], inner, comm, **options)
    assert isinstance(found, error)
    assert text in str(found)
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


def test_other_groups_may_have_momentum(comm, rank, size):
    net = Net()
    plain = copy.deepcopy(net)

    def sgd(net):
        last = {"params": net.last.parameters(), "momentum": 0.5}
        return torch.optim.SGD([{"params": [net.bag.weight]}, last], 0.5)

    inner = sgd(plain)
    with hpt.SyncReplicas(sgd(net), size, comm=comm, sparse=[net.bag.weight]) as opt:
        for step in (0, 2, 3):
            net.backward(rank, step)
            opt.step()
            inner.zero_grad()
            for each in range(size):
                plain.backward(each, step)
            for parameter in plain.parameters():
                parameter.grad /= size
            inner.step()
    for own, other in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own, other)


def test_a_state_with_momentum_is_refused(comm, rank):
    other, module = table(), table()
    inner = torch.optim.SGD(other.parameters(), 1.0, momentum=0.5)
    with hpt.DropStale(inner, 1, comm=comm) as opt:
        state = opt.state_dict() if rank == 0 else None
        meet()
    with held("DropStale", "SGD", module, comm) as opt:
        error = raised(opt.load_state_dict, state)
        assert isinstance(error, INVALID)
        assert "sparse gradients on a server need" in str(error)
        assert opt.param_groups[0]["momentum"] == 0
        backward(module, rank, 0)
        turns([0], lambda _: opt.step())
        assert opt.global_step == 1


def test_momentum_that_a_scheduler_sets_is_an_error():
    module, center = table(), table()
    inner = torch.optim.SGD(module.parameters(), 1.0)
    rule = TorchRule(inner, {"w": module.weight}, ["w"], None)
    var = hpc.Variable(center.weight.detach().numpy(), "w")
    rule.initialize([var])
    grad = hpc.IndexedSlices(torch.ones(1, WIDTH).numpy(), [3], (ROWS, WIDTH))
    rule.apply_gradients([(grad, var)])
    inner.param_groups[0]["momentum"] = 0.5
    with pytest.raises(INVALID, match=r"not SGD with momentum=0\.5"):
        rule.apply_gradients([(grad, var)])
    expected = table().weight.detach()
    expected[3] -= 1
    assert torch.equal(center.weight, expected)


@pytest.mark.parametrize("kind", ONE_SIDED)
def test_sparse_adam_needs_all_of_its_parameters(kind, comm):
    inner = torch.optim.SparseAdam(table().parameters())
    error = raised(STRATEGIES[kind], inner, comm)
    assert "SparseAdam needs sparse gradients, and 'parameter 0' has" in str(error)
