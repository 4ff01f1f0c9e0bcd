"""Parameters as variables; their gradients, and the optimizers for sparse ones."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from hpcaccum.dtypes import Array
from hpcaccum.errors import InvalidArgumentError
from hpcaccum.optimizers import Variable
from hpcaccum.optimizers.checks import Pairs
from hpcaccum.optimizers.slices import Gradient
from hpcaccum.rows import IndexedSlices
from hpcaccum.torch.tensors import array_of, tensor_of

# The optimizers that update only the rows of a sparse gradient, if these options are
# zero or False: with the last one, PyTorch refuses sparse gradients.
_UPDATE_ROWS: dict[type, tuple[str, ...]] = {
    torch.optim.SGD: ("momentum", "weight_decay", "fused"),
    torch.optim.Adagrad: ("weight_decay", "fused"),
    torch.optim.SparseAdam: (),
}


class Parameters:
    """The parameters of an optimizer, as variables that share their memory.

    As in DistributedDataParallel, gradients stay in the memory in which PyTorch
    computes them: the exchange copies them from there, and `replace` copies the means
    back.

    Attributes:
        tensors, variables: The parameters, by name; `names` has the names.
        sparse: The names of those whose gradients are sparse.
        hooks: Handles of the hooks that report gradients, by parameter.
    """

    def __init__(
        self,
        tensors: Mapping[str, Any],
        sparse: Collection[str] = (),
        capacity: int | None = None,
    ) -> None:
        self.tensors, self.sparse = tensors, sorted({*sparse})
        self.names = {tensor: name for name, tensor in tensors.items()}
        self.variables = {
            name: Variable(array_of(tensor), name, sparse=True, capacity=capacity)
            if name in sparse
            else Variable(array_of(tensor), name)
            for name, tensor in tensors.items()
        }
        self.hooks: dict[Any, Any] = {}
        # The variables are in this memory.
        self._memory = {name: tensor.detach() for name, tensor in tensors.items()}
        self._versions: list[int] = []

    # Their values

    def reclaim(self) -> None:
        """Move parameters back to the memory of the variables; ``p.data = x`` moves."""
        for name, memory in self._memory.items():
            parameter = self.tensors[name]
            if parameter.data_ptr() != memory.data_ptr():
                _check_same(name, parameter, memory)
                same = torch.allclose(parameter, memory, rtol=0, atol=0, equal_nan=True)
                if not same:
                    # It counts as a change of the parameter, whose version this is.
                    memory.copy_(parameter.detach())
                parameter.data = memory

    def note_values(self) -> None:
        """Take the values of the parameters for those that the adapter has written."""
        self._versions = [each._version for each in self.names]

    def check_values(self) -> None:
        """Raise InvalidArgumentError if the program has changed a parameter since.

        PyTorch counts changes of a tensor, but not those of its ``.data``.
        """
        found = zip(self.tensors.items(), self._versions, strict=True)
        for (name, parameter), version in found:
            if parameter._version != version:
                raise InvalidArgumentError(
                    f"the program has changed the values of {name!r}, but the server "
                    f"would replace them; to keep them, call opt.assign() on all ranks "
                    f"after the change"
                )

    # Their gradients

    def add_hooks(self, call: Callable[[Any], None]) -> None:
        """Have each gradient reported, once, when a backward pass has computed it."""
        self.hooks = self.hooks or {each: _hook(each, call) for each in self.names}

    def is_final(self, parameter: Any) -> bool:
        """Whether a gradient that is reported is dense, and no hook comes after."""
        hook = self.hooks[parameter]
        last = next(reversed(hook.hooks_dict_ref()))
        return not self.variables[self.names[parameter]].sparse and last == hook.id

    def pairs(self) -> Pairs:
        """Return the gradients, as arrays, or rows if sparse, with their variables."""
        return [(self._found(name, var), var) for name, var in self.variables.items()]

    def _found(self, name: str, var: Variable) -> Gradient | None:
        grad = self.tensors[name].grad
        if grad is None:
            return None
        return slices_of(name, grad) if var.sparse else dense(name, grad)

    def replace(self, means: Mapping[str, Gradient]) -> None:
        """Replace gradients in CPU memory by means."""
        for name, mean in means.items():
            parameter = self.tensors[name]
            if isinstance(mean, IndexedSlices):
                parameter.grad = gradient_of(mean, parameter.dtype)
            else:
                np.copyto(array_of(parameter.grad), mean, casting="same_kind")

    def fill(self) -> frozenset[str]:
        """Set each ``grad`` that is None to zeros; return the names of these."""
        lacks = [name for name, p in self.tensors.items() if p.grad is None]
        for name in lacks:
            parameter = self.tensors[name].detach()
            if self.variables[name].sparse:
                none = np.empty(0, np.int64)
                rows = IndexedSlices(array_of(parameter[:0]), none, parameter.shape)
                grad = gradient_of(rows, parameter.dtype)
            else:
                grad = torch.zeros_like(parameter)
            self.tensors[name].grad = grad
        return frozenset(lacks)

    def clear(self, names: Iterable[str] | None = None) -> None:
        """Set each ``grad``, or those of some names, to None."""
        for name in self.tensors if names is None else names:
            self.tensors[name].grad = None


def _check_same(name: str, now: Any, before: Any) -> None:
    """Raise unless a parameter is like it was when the optimizer was wrapped."""
    facts = [(tuple(each.shape), each.dtype, each.device) for each in (now, before)]
    if facts[0] != facts[1]:
        texts = [f"{dtype} of {shape} on {place}" for shape, dtype, place in facts]
        raise InvalidArgumentError(
            f"{name!r} has been replaced: it was {texts[1]} and is {texts[0]} now; "
            f"convert a model before its optimizer is wrapped"
        )


def _hook(parameter: Any, call: Callable[[Any], None]) -> Any:
    """Add a hook to a parameter, also if it is not trained yet; return its handle."""
    trained = parameter.requires_grad
    handle = parameter.requires_grad_().register_post_accumulate_grad_hook(call)
    parameter.requires_grad_(trained)
    return handle


def dense(name: str, grad: Any) -> Array:
    """Return a gradient that is not sparse."""
    if grad.layout != torch.strided:
        raise InvalidArgumentError(
            f"the gradient of {name!r} is sparse; name this parameter in sparse=[...] "
            f"on all ranks, or make the module with sparse=False"
        )
    return array_of(grad)


# Sparse gradients, of some rows of a parameter


def names_of_sparse(
    sparse: Any, capacity: Any, optimizer: Any, parameters: Mapping[str, Any]
) -> list[str]:
    """Return the names of the parameters whose gradients are sparse; check options."""
    if isinstance(sparse, torch.Tensor) or not isinstance(sparse, Iterable):
        raise TypeError(
            f"sparse must be a list of parameters, got {type(sparse).__name__}"
        )
    names = {id(parameter): name for name, parameter in parameters.items()}
    found = []
    for place, parameter in enumerate(sparse):
        if (name := names.get(id(parameter))) is None:
            raise InvalidArgumentError(
                f"sparse[{place}] is not a parameter of the optimizer"
            )
        if not parameter.ndim:
            raise InvalidArgumentError(f"{name!r} in sparse= is a number, without rows")
        found.append(name)
    if capacity is not None and not found:
        raise InvalidArgumentError("capacity needs parameters in sparse=[...]")
    others = [name for name in parameters if name not in found]
    if others and isinstance(optimizer, torch.optim.SparseAdam):
        raise InvalidArgumentError(
            f"SparseAdam needs sparse gradients, and {others[0]!r} has none: name all "
            f"of its parameters in sparse=[...]"
        )
    return found


def needs_for_rows(optimizer: Any, groups: Sequence[Mapping[str, Any]]) -> str | None:
    """Return what an optimizer lacks to surely update only rows; None if nothing."""
    own = type(optimizer)
    found = [
        f"{name}={group[name]}"
        for group in groups
        for name in _UPDATE_ROWS.get(own, ())
        if group.get(name)
    ]
    if own in _UPDATE_ROWS and not found:
        return None
    return (
        f"SparseAdam, SGD without momentum and weight_decay, or Adagrad without "
        f"weight_decay, and not fused; not {own.__name__}"
        f"{' with ' if found else ''}{', '.join(dict.fromkeys(found))}"
    )


def slices_of(name: str, gradient: Any) -> IndexedSlices:
    """Return a sparse gradient as rows that share its memory."""
    if gradient.layout != torch.sparse_coo or gradient.sparse_dim() != 1:
        raise InvalidArgumentError(
            f"the gradient of {name!r}, which is in sparse=, must be a sparse tensor "
            f"of rows, got {_kind(gradient)}; make the module with sparse=True, or "
            f"leave the parameter out of sparse="
        )
    # `indices` and `values` refuse repeated rows.
    indices, values = gradient._indices()[0], gradient._values()
    return IndexedSlices(array_of(values), array_of(indices), tuple(gradient.shape))


def _kind(gradient: Any) -> str:
    if gradient.layout == torch.sparse_coo:
        return f"one with {gradient.sparse_dim()} sparse dimensions"
    return f"one of {gradient.layout}"


def gradient_of(slices: IndexedSlices, dtype: Any) -> Any:
    """Return rows, ascending and each of them once, as a sparse tensor."""
    indices = tensor_of(slices.indices)[None]
    values = tensor_of(np.asarray(slices.values)).to(dtype)
    assert slices.dense_shape is not None
    return torch.sparse_coo_tensor(
        indices, values, slices.dense_shape, is_coalesced=True, check_invariants=False
    )
