"""A multilayer perceptron in plain NumPy, or CuPy."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcaccum.device import library

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from hpcaccum import Variable

Array = np.ndarray[Any, Any]

# Rows evaluated at a time, to bound the memory.
_CHUNK = 4096


class MLP:
    """Fully connected layers, ReLU between them, softmax cross-entropy at the end.

    Args:
        sizes: Widths of all layers: features, hidden ones, classes.
        seed: Of the initial weights; the same seed, the same weights.
        variable: Makes a variable of an array and a name.
        dtype: Of the variables and all arithmetic.
        place: Brings an array to where the model is computed.

    Attributes:
        variables: Weights (inputs, outputs) and biases (outputs,), layer by layer.

    Source: He et al., Delving Deep into Rectifiers, 2015, for the initial weights.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        seed: int,
        variable: Callable[[Array, str], Variable],
        dtype: Any = np.float32,
        place: Callable[[Array], Array] = np.asarray,
    ) -> None:
        self._place = place
        rng = np.random.default_rng(seed)
        self.variables: list[Variable] = []
        for number, (inputs, outputs) in enumerate(itertools.pairwise(sizes)):
            weights = rng.standard_normal((inputs, outputs)) * np.sqrt(2 / inputs)
            self.variables += [
                variable(place(weights.astype(dtype)), f"weights{number}"),
                variable(place(np.zeros(outputs, dtype)), f"biases{number}"),
            ]

    def _layers(self) -> list[tuple[Array, Array]]:
        values = [variable.value for variable in self.variables]
        return list(zip(values[::2], values[1::2], strict=True))

    def _forward(self, x: Array) -> list[Array]:
        """Return the inputs of all layers, then the class scores."""
        layers, out = self._layers(), [x]
        for number, (weights, biases) in enumerate(layers):
            z = out[-1] @ weights + biases
            out.append(z if number + 1 == len(layers) else np.maximum(z, 0))
        return out

    def loss_and_gradients(
        self, x: Array, y: Array, into: Mapping[str, Array] | None = None
    ) -> tuple[float, list[Array]]:
        """Return the mean loss of a batch and its gradients, as `variables` lie.

        Args:
            x: (n, features).
            y: (n,) class numbers.
            into: Arrays for the gradients, by the names of the variables; new ones by
                default.
        """
        into = into or {var.name: np.empty_like(var.value) for var in self.variables}
        gradients = [into[var.name] for var in self.variables]
        labels = self._place(y)
        *inputs, scores = self._forward(self._place(x))
        losses = _log_softmax(scores)
        rows = library(labels).arange(len(y))
        value = -float(losses[rows, labels].mean())
        error = np.exp(losses)
        error[rows, labels] -= 1
        error /= len(y)
        for number in reversed(range(len(inputs))):
            np.matmul(inputs[number].T, error, out=gradients[2 * number])
            np.sum(error, axis=0, out=gradients[2 * number + 1])
            if number:
                error = (error @ self._layers()[number][0].T) * (inputs[number] > 0)
        return value, gradients

    def evaluate(self, x: Array, y: Array) -> tuple[float, float]:
        """Return the mean loss, and the share of rows whose class is found."""
        loss = right = 0.0
        for begin in range(0, len(y), _CHUNK):
            rows = slice(begin, begin + _CHUNK)
            losses = _log_softmax(self._forward(self._place(x[rows]))[-1])
            labels = self._place(y[rows])
            loss -= float(losses[library(labels).arange(len(labels)), labels].sum())
            right += int((losses.argmax(axis=1) == labels).sum())
        return loss / len(y), right / len(y)


def _log_softmax(scores: Array) -> Array:
    shifted = scores - scores.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))  # type: ignore[no-any-return]
