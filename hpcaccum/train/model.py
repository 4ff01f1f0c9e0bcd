"""A multilayer perceptron in plain NumPy or CuPy."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from hpcaccum import Variable
from hpcaccum.device import library, to_host
from hpcaccum.dtypes import Array

# Number of rows evaluated at once, to limit the memory.
_CHUNK = 4096
# No warning when a training diverges: it shows as a loss that is not finite.
_quiet = np.errstate(over="ignore", invalid="ignore")


class MLP:
    """Fully connected layers, ReLU between them, softmax cross-entropy at the end.

    `variables` are weights (inputs, outputs) and biases (outputs,), layer by layer.
    ``to_device`` moves an array to the device that computes the model.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        seed: int,
        dtype: Any = np.float32,
        to_device: Callable[[Array], Array] = np.asarray,
    ) -> None:
        self._to_device = to_device
        rng = np.random.default_rng(seed)
        self.variables: list[Variable] = []
        for number, (inputs, outputs) in enumerate(itertools.pairwise(sizes)):
            weights = rng.standard_normal((inputs, outputs)) * np.sqrt(2 / inputs)
            self.variables += [
                Variable(to_device(weights.astype(dtype)), f"weights{number}"),
                Variable(to_device(np.zeros(outputs, dtype)), f"biases{number}"),
            ]

    def _forward(self, x: Array) -> list[Array]:
        """Return the inputs of all layers, then the logarithms of the probabilities."""
        out, values = [x], [variable.value for variable in self.variables]
        for weights, biases in zip(values[::2], values[1::2], strict=True):
            z = out[-1] @ weights + biases
            out.append(np.maximum(z, 0))
        shifted = z - z.max(axis=1, keepdims=True)
        out[-1] = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
        return out

    @_quiet
    def loss_and_gradients(
        self, x: Array, y: Array, into: Mapping[str, Array] | None = None
    ) -> tuple[float, list[Array]]:
        """Return the mean loss of a batch and its gradients, ordered as `variables`."""
        into = into or {var.name: np.empty_like(var.value) for var in self.variables}
        gradients = [into[var.name] for var in self.variables]
        labels = self._to_device(y)
        *inputs, losses = self._forward(self._to_device(x))
        rows = library(labels).arange(len(y))
        value = -float(losses[rows, labels].mean())
        error = np.exp(losses)
        error[rows, labels] -= 1
        error /= len(y)
        for number in reversed(range(len(inputs))):
            np.matmul(inputs[number].T, error, out=gradients[2 * number])
            np.sum(error, axis=0, out=gradients[2 * number + 1])
            if number:
                weights = self.variables[2 * number].value
                error = (error @ weights.T) * (inputs[number] > 0)
        return value, gradients

    @_quiet
    def evaluate(self, x: Array, y: Array) -> tuple[float, float]:
        """Return the mean loss and the accuracy."""
        loss, right = 0.0, 0
        for begin in range(0, len(y), _CHUNK):
            rows = slice(begin, begin + _CHUNK)
            losses = self._forward(self._to_device(x[rows]))[-1]
            labels = self._to_device(y[rows])
            loss -= float(losses[library(labels).arange(len(labels)), labels].sum())
            right += int((losses.argmax(axis=1) == labels).sum())
        return loss / len(y), right / len(y)


@_quiet
def noise_scale(gradients: Iterable[list[Array]], batch: int) -> float | None:
    """Return the noise scale of gradients of so many samples each; None: unknown.

    In samples, by McCandlish et al. (2018), arXiv:1812.06162, appendix A.1: the squared
    norms of one gradient and of the mean of all, which has many times the samples.
    """
    count, one = 0, 0.0
    total: Any = 0.0
    for each in gradients:
        flat = np.concatenate([to_host(array).reshape(-1) for array in each])
        count, total, one = count + 1, total + flat, one + float(flat @ flat)
    one, mean = one / count, total / count
    noise = (one - float(mean @ mean)) * batch
    signal = float(mean @ mean) - one / count
    return noise / signal if signal > 0 else None
