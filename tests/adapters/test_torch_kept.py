"""A gradient that a program keeps is never overwritten, as in PyTorch."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

import hpcaccum.torch as hpt

from .torch_training import STRATEGIES, Model, gradient

# How a program keeps a gradient.
WAYS = {
    "tensor": lambda grad: grad,
    "detached": lambda grad: grad.detach(),
    "view": lambda grad: grad.view(-1),
    "part": lambda grad: grad[1:],
    "array": lambda grad: grad.numpy(),
    "part of an array": lambda grad: grad.numpy()[1:],
    "storage": lambda grad: torch.empty(0).set_(grad.untyped_storage()),
    "capsule": lambda grad: torch.from_dlpack(torch.utils.dlpack.to_dlpack(grad)),
    "saved": lambda grad: torch.ones_like(grad).requires_grad_() * grad,
}


def values(kept):
    if isinstance(kept, np.ndarray):
        return kept.copy()
    if kept.grad_fn is not None:
        # What autograd has saved of the product.
        leaf = kept.grad_fn.next_functions[0][0].variable
        [kept] = torch.autograd.grad(kept.sum(), leaf, retain_graph=True)
    return kept.numpy().copy()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["CrossShard", "SyncReplicas"])  # means, and its own
def test_a_kept_gradient_does_not_change(kind, way, comm, rank, size):
    model = Model()
    kept, copies = [], []
    with STRATEGIES[kind](torch.optim.SGD(model.parameters(), 0.1), comm) as opt:
        for step in range(4):
            model.backward(rank, step)
            assert model.w.grad.data_ptr() != model.b.grad.data_ptr()
            for each in model.parameters():
                kept.append(WAYS[way](each.grad))
                copies.append(values(kept[-1]))
            if step % 2:
                opt.step()
            opt.zero_grad(set_to_none=True)
    for each, expected in zip(kept, copies, strict=True):
        np.testing.assert_array_equal(values(each), expected)
    assert len({each.tobytes() for each in copies}) > 2


@pytest.mark.parametrize("ends", ["in order", "by an error"])
def test_a_gradient_that_a_hook_takes_does_not_change_later(ends, comm, rank):
    model, kept = Model(), []

    def take(_):
        kept.extend(p.grad for p in model.parameters() if p.grad is not None)
        if ends == "by an error" and len(kept) > 1:
            raise ValueError("enough")

    # Before ours, which then begin the exchange of each gradient.
    hooks = [
        each.register_post_accumulate_grad_hook(take) for each in model.parameters()
    ]
    with hpt.CrossShard(torch.optim.SGD(model.parameters(), 0.1), comm=comm) as opt:
        if ends == "in order":
            model.backward(rank, 0)
        else:
            with pytest.raises(ValueError, match="enough"):
                model.backward(rank, 0)
        for hook in hooks:
            hook.remove()
        copies = [each.numpy().copy() for each in kept]
        opt.zero_grad()
        for step in range(1, 4):
            model.backward(rank, step)
            opt.step()
            opt.zero_grad()
    assert len(kept) > 2
    for each, expected in zip(kept, copies, strict=True):
        np.testing.assert_array_equal(each.numpy(), expected)


@pytest.mark.parametrize("how", ["zeroed", "own buffers", "parts of a vector"])
def test_gradients_that_exist_are_added_to_in_place(how, comm, rank, size):
    model = Model()
    flat = torch.zeros(2, model.w.numel() + model.b.numel())
    pairs = [
        [row[: model.w.numel()].view_as(model.w), row[model.w.numel() :]]
        for row in (flat if how == "parts of a vector" else copy.deepcopy(flat))
    ]
    with hpt.CrossShard(torch.optim.SGD(model.parameters(), 0.1), comm=comm) as opt:
        model.backward(rank, 9)
        for step in range(3):
            if how == "zeroed":
                opt.zero_grad(set_to_none=False)
                held = [each.grad for each in model.parameters()]
            else:
                held = pairs[step % 2]
                for each, grad in zip(model.parameters(), held, strict=True):
                    each.grad = grad.zero_()
            before = [each.clone() for each in pairs[1 - step % 2]]
            model.backward(rank, step)
            for (name, each), grad in zip(model.named_parameters(), held, strict=True):
                assert each.grad is grad
                at = [gradient(name, each, r, step).double() for r in range(size)]
                mean = sum(at) / size
                torch.testing.assert_close(grad.double(), mean)
            if how != "zeroed":
                for each, old in zip(pairs[1 - step % 2], before, strict=True):
                    assert torch.equal(each, old)
            opt.step()


def test_a_kept_sparse_mean_does_not_change(comm, rank, size):
    table = torch.nn.Embedding(8, 2, sparse=True)
    inner = torch.optim.SGD(table.parameters(), 0.1)
    kept, copies = [], []
    with hpt.CrossShard(inner, comm=comm, sparse=[table.weight]) as opt:
        for step in range(4):
            (table(torch.tensor([rank, step])) * (step + 1)).sum().backward()
            kept.append(table.weight.grad)
            copies.append(table.weight.grad.to_dense())
            opt.step()
            opt.zero_grad()
    for each, expected in zip(kept, copies, strict=True):
        torch.testing.assert_close(each.to_dense(), expected)


def test_after_an_error_gradients_are_no_memory_of_the_exchange(comm, rank, size):
    model = Model()
    with hpt.CrossShard(torch.optim.SGD(model.parameters(), 0.1), comm=comm) as opt:
        if size > 1:
            with pytest.raises(ValueError, match="find_unused"):
                model.backward(rank, 0, "w" if rank else "wb")
            kept = model.w.grad
            torch.testing.assert_close(kept, gradient("w", kept, rank, 0))
            opt.zero_grad()
            model.backward(rank, 1)
            torch.testing.assert_close(kept, gradient("w", kept, rank, 0))
