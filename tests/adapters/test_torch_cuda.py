"""Tensors on a CUDA device: what tensors in CPU memory become with the same gradients.

The device is simulated; with -m gpu it is a real one.
"""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

import hpcaccum as hpc
import hpcaccum.torch as hpt
from hpcaccum.device import arrays as device
from hpcaccum.torch import tensors
from tests import internals

from ..common import every_pair
from ..mpi.on_device import FEW_RANKS, wants_gpu
from .torch_training import (
    ONE_SIDED,
    STRATEGIES,
    Model,
    dedicated,
    gradient,
    groups,
    refused,
    same_everywhere,
    saved,
    train,
)

pytestmark = FEW_RANKS

OPTIMIZERS = {
    "SGD": lambda params, **more: torch.optim.SGD(params, 0.1, momentum=0.9, **more),
    "AdamW": lambda params, **more: torch.optim.AdamW(params, 0.1, **more),
}


class Device:
    """Where the tests have their tensors."""

    def __init__(self, cp, simulated):
        self.cp, self.simulated = cp, simulated
        self.name = simulated.NAME if simulated else "cuda"

    def model(self, *args, **options):
        return self.put(Model(*args, **options))

    def put(self, module):
        for each in module.modules():
            for name, parameter in each.named_parameters(recurse=False):
                moved = torch.nn.Parameter(
                    self.tensor(parameter), parameter.requires_grad
                )
                setattr(each, name, moved)
            for name, buffer in each.named_buffers(recurse=False):
                setattr(each, name, self.tensor(buffer))
        return module

    def tensor(self, host):
        host = host.detach()
        return self.simulated.to_device(host) if self.simulated else host.cuda()

    def use_stream(self):
        """Let PyTorch use a stream that does not wait for the null stream."""
        if self.simulated:
            self.simulated.use_stream(self.cp.cuda.Stream(non_blocking=True))
        else:
            torch.cuda.set_stream(torch.cuda.Stream())


# Work on a stream of its own waits for no other, so that a missing wait is found.
@pytest.fixture(params=["own stream"])
def there(request, cp, monkeypatch):
    simulated = None
    if not wants_gpu(request.config):
        # It imports the simulated CuPy.
        from . import device_tensors as simulated

        simulated.install(monkeypatch)
    elif not torch.cuda.is_available():
        pytest.skip("this PyTorch has no CUDA")
    else:
        torch.cuda.set_device(cp.cuda.Device().id)
    found = Device(cp, simulated)
    if request.param == "own stream":
        found.use_stream()
    yield found
    cp.cuda.Device().synchronize()


def check_same(found, wanted, exact=True):
    found, wanted = (module.state_dict() for module in (found, wanted))
    for name in wanted:
        values = [state[name].cpu().double().numpy() for state in (found, wanted)]
        np.testing.assert_allclose(*values, 0, 0 if exact else 1e-5)


@pytest.mark.parametrize(
    ("there", "name", "kind"),
    every_pair(["null stream", "own stream"], OPTIMIZERS, STRATEGIES),
    indirect=["there"],
)
def test_updates_are_those_in_cpu_memory(kind, name, there, comm, rank, size):
    models = [Model(start=rank), there.model(start=rank)]
    counts = []
    for model in models:
        inner = OPTIMIZERS[name](groups(model))
        with STRATEGIES[kind](inner, comm) as opt:
            train(opt, model, kind, rank, size, range(4))
            center = opt.center([model.w, model.b])
            assert center[0].device == model.w.device
            assert center[1].shape == model.b.shape
        counts.append((opt.global_step, opt.statistics()))
        assert torch.equal(opt.center(model.w), model.w)
    # The device's libraries may round the steps of a torch optimizer differently.
    check_same(models[1], models[0], exact=there.simulated)
    assert counts[0] == counts[1]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kind", ["CrossShard", "DropStale"])
def test_dtypes(kind, dtype, there, comm, rank, size):
    models = [Model(rank, dtype), there.model(rank, dtype)]
    for model in models:
        with STRATEGIES[kind](torch.optim.SGD(groups(model), 0.25), comm) as opt:
            train(opt, model, kind, rank, size, range(2))
    check_same(models[1], models[0])


def test_means_replace_the_gradients(there, comm, rank, size):
    model = there.model()
    with hpt.CrossShard(torch.optim.SGD(model.parameters(), 1.0), comm=comm) as opt:
        with opt.no_sync():
            model.backward(rank, 0)
        own = model.w.grad
        model.backward(rank, 1)
        assert model.w.grad is own
        both = [(each, step) for each in range(size) for step in range(2)]
        for name, parameter in model.named_parameters():
            wanted = sum(gradient(name, parameter.cpu(), *each) for each in both) / size
            np.testing.assert_allclose(parameter.grad.cpu().numpy(), wanted, 1e-6)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        clipped = [each.grad.clone() for each in (model.w, model.b)]
        opt.step()
    for parameter, grad in zip((model.w, model.b), clipped, strict=True):
        np.testing.assert_allclose(parameter.detach().cpu(), -grad.cpu(), 1e-6)


@pytest.mark.parametrize("buffers", ["average", "broadcast"])
def test_buffers_and_fixed_parameters(buffers, there, comm, rank, size):
    def made():
        module = torch.nn.BatchNorm1d(4)
        module.running_mean += rank
        module.num_batches_tracked += rank
        module.register_buffer("mask", torch.tensor([rank == 0, True]))
        module.register_buffer("narrow", torch.full((2,), rank, dtype=torch.bfloat16))
        module.weight.data += rank
        return module

    modules = [made(), there.put(made())]
    for module in modules:
        inner = torch.optim.SGD([module.bias], 1.0)
        with hpt.CrossShard(inner, module=module, buffers=buffers, comm=comm) as opt:
            assert module.running_mean.cpu().eq(0).all()
            module.running_mean += 2 * rank
            module.num_batches_tracked += rank
            opt.sync_buffers()
            average = (size - 1 if buffers == "average" else 0) * torch.ones(4)
            assert torch.equal(module.running_mean.cpu(), average)
            assert module.num_batches_tracked.item() == 0
            assert module.mask.cpu().all()
            assert module.mask.dtype == torch.bool
    check_same(modules[1], modules[0])


@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("kind", ["CrossShard", "SyncReplicas"])
def test_a_state_is_loaded_anywhere(kind, capturable, there, comm, rank, size):
    def adam(model, **more):
        return torch.optim.Adam(groups(model), 0.1, **more)

    models = [there.model(), there.model(start=9.0), Model(start=9.0)]
    with STRATEGIES[kind](adam(models[0], capturable=capturable), comm) as opt:
        train(opt, models[0], kind, rank, size, range(2))
        state, updates = saved(opt, rank), opt.global_step
        train(opt, models[0], kind, rank, size, range(2, 4))
    if rank == 0:
        assert all(tensor.device.type == "cpu" for tensor in _tensors(state["state"]))
    for model, more in zip(models[1:], [{"capturable": capturable}, {}], strict=True):
        inner = adam(model, **more)
        with STRATEGIES[kind](inner, comm) as opt:
            train(opt, model, kind, rank, size, range(1))
            own = copy.deepcopy(state)
            if rank == 0 and model is models[1]:
                # As torch.load(map_location=...) returns it.
                own["parameters"] = _moved(there, own["parameters"])
                own["state"] = {n: _moved(there, s) for n, s in own["state"].items()}
            opt.load_state_dict(own)
            if model.w.device.type == "cpu":
                # An option of the device.
                opt.param_groups[0]["capturable"] = False
                opt.param_groups[1]["capturable"] = False
            assert opt.global_step == updates
            if kind == "CrossShard":
                found = inner.state[model.w]
                assert found["exp_avg"].device == model.w.device
                there_too = capturable and model is models[1]
                assert (found["step"].device.type != "cpu") == there_too
            train(opt, model, kind, rank, size, range(2, 4))
        check_same(model, models[0], exact=False)


def _tensors(state):
    return [part for parts in state.values() for part in parts.values()]


def _moved(there, parts):
    return {name: there.tensor(part) for name, part in parts.items()}


@pytest.mark.parametrize(
    "options", [{}, {"fused": True}, {"capturable": True}], ids=str
)
def test_a_server_continues_with_the_state_of_an_optimizer(options, there, comm, size):
    model, plain = there.model(), Model()
    inners = []
    for each, more in ((model, options), (plain, {})):
        inners.append(torch.optim.Adam(groups(each), 0.1, **more))
        each.backward(0, 0)
        inners[-1].step()
        inners[-1].zero_grad()
    with hpt.SyncReplicas(inners[0], size, comm=comm) as opt:
        for step in range(1, 3):
            model.backward(0, step)
            plain.backward(0, step)
            opt.step()
            inners[1].step()
            inners[1].zero_grad()
    check_same(model, plain, exact=False)


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("kind", ONE_SIDED)
def test_a_dedicated_host_only_serves(kind, there, comm, rank, size):
    model = there.model(start=rank)
    inner = torch.optim.SGD(groups(model), 1.0)
    with dedicated(kind, inner, comm, 0) as opt:
        if rank == 0:
            opt.serve()
            assert model.w.isfinite().all()
            assert model.w.ne(0).any()
        else:
            model.backward(rank, 0)
            opt.step()
    same_everywhere(model.w, model.b)
    assert model.w.cpu().ne(0).any()


@pytest.mark.parametrize("there", ["null stream", "own stream"], indirect=True)
def test_nccl_sums_gradients_on_request(own_card, there, comm, rank, size):
    models = [Model(), there.model()]
    for model, more in zip(models, [{}, {"schedule": "nccl"}], strict=True):
        inner = torch.optim.SGD(groups(model), 0.5)
        with hpt.CrossShard(inner, comm=comm, **more) as opt:
            train(opt, model, "CrossShard", rank, size, range(3))
            used = internals.reducer(opt).statistics().schedule
            assert (used == "nccl") == bool(more)
    check_same(models[1], models[0], exact=False)


@pytest.mark.ranks(min=2)
def test_some_ranks_may_have_no_device(there, comm, rank, size):
    models = [Model(), there.model() if rank else Model()]
    for model in models:
        with hpt.CrossShard(torch.optim.SGD(groups(model), 1.0), comm=comm) as opt:
            train(opt, model, "CrossShard", rank, size, range(2))
    check_same(models[1], models[0])


def wrong(there, monkeypatch, case):
    """Return an optimizer that cannot be used, with options."""
    model, options = there.model(), {}
    parameters = list(model.parameters())
    if case == "another device":
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    elif case == "no library":

        def missing():
            raise hpc.DeviceUnavailableError("CuPy is not here")

        monkeypatch.setattr(device, "cupy", missing)
    elif case == "threads":
        monkeypatch.setattr(
            tensors.MPI, "Query_thread", lambda: tensors.MPI.THREAD_FUNNELED
        )
    elif case == "layout":
        parameters = [torch.nn.Parameter(model.w.detach().t())]
    elif case == "two devices":
        parameters.append(torch.nn.Parameter(torch.zeros(2)))
    elif case == "sparse":
        options = {"sparse": [model.w]}
    return torch.optim.SGD(parameters, 1.0), options


WRONG = {
    "another device": "the current one is 3; call torch.cuda.set_device(0) first",
    "no library": "CuPy is not here",
    "threads": "MPI provides no MPI_THREAD_SERIALIZED",
    "layout": "an array on the device must be contiguous",
    "two devices": "all parameters must be on one device, they are on cpu, ",
    "sparse": "which is sparse, must be an array in CPU memory with rows",
}


@pytest.mark.parametrize("there", ["null stream"], indirect=True)
@pytest.mark.parametrize("case", WRONG)
def test_what_one_rank_has_is_an_error_on_all(case, there, comm, rank, monkeypatch):
    usable = torch.optim.SGD(Model().parameters(), 1.0)

    def make():
        inner, options = usable, {}
        if rank == 0:
            inner, options = wrong(there, monkeypatch, case)
        return hpt.CrossShard(inner, comm=comm, **options)

    assert WRONG[case] in str(refused(make))
