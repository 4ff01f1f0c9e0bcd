"""The update rules: SGD, Momentum, Adagrad, Adam.

Each has two implementations, with the same operations in the same order: in NumPy in
this module, and in CUDA in kernels/update.cu.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from hpcaccum.dtypes import Array
from hpcaccum.errors import InvalidArgumentError
from hpcaccum.optimizers.update_rule import Rate, Rule, checked_number


class SGD(Rule):
    """Gradient descent: ``value -= learning_rate * grad``.

    An `IndexedSlices` has the same effect as an array that is zero elsewhere.

    Args:
        learning_rate, name: As in `Rule`.

    Source: Robbins and Monro, A Stochastic Approximation Method, 1951; TensorFlow's
    GradientDescentOptimizer.
    """

    __slots__ = ()

    _kernel = "sgd"

    def __init__(self, learning_rate: Rate, name: str = "SGD") -> None:
        super().__init__(learning_rate, name)

    def _update(self, value: Array, grad: Array, *rest: Any) -> None:
        scratch, rate = rest
        np.multiply(grad, rate, scratch)
        np.subtract(value, scratch, value)


class Momentum(Rule):
    """Gradient descent with momentum.

    ``accum = momentum * accum + grad``; then ``value -= learning_rate * accum``, or
    with Nesterov's, ``value -= learning_rate * (grad + momentum * accum)``. The slot is
    "momentum".

    With an `IndexedSlices`, the momentum of other rows neither decays nor changes their
    values; with an array that is zero there, it does both.

    Args:
        learning_rate, name: As in `Rule`.
        momentum: A finite number.
        use_nesterov: Whether to use Nesterov's form.

    Source: Sutskever et al., On the importance of initialization and momentum in deep
    learning, 2013, in the form of TensorFlow's MomentumOptimizer, whose accumulator
    does not contain the learning rate.
    """

    __slots__ = ("_kernel", "_momentum", "_use_nesterov")

    def __init__(
        self,
        learning_rate: Rate,
        momentum: float,
        use_nesterov: bool = False,
        name: str = "Momentum",
    ) -> None:
        super().__init__(learning_rate, name)
        self._momentum = checked_number(momentum, "momentum", -math.inf)
        self._use_nesterov = bool(use_nesterov)
        self._kernel = "nesterov" if use_nesterov else "momentum"

    def _options(self) -> dict[str, Any]:
        return {"momentum": self._momentum, "use_nesterov": self._use_nesterov}

    def _slots(self) -> dict[str, float]:
        return {"momentum": 0.0}

    def _constants(self) -> tuple[float, ...]:
        return (self._momentum,)

    def _update(self, value: Array, grad: Array, *rest: Any) -> None:
        accum, scratch, rate = rest
        np.multiply(accum, self._momentum, accum)
        np.add(accum, grad, accum)
        if self._use_nesterov:
            np.multiply(accum, self._momentum, scratch)
            np.add(scratch, grad, scratch)
            np.multiply(scratch, rate, scratch)
        else:
            np.multiply(accum, rate, scratch)
        np.subtract(value, scratch, value)


class Adagrad(Rule):
    """Gradient descent with steps scaled by each element's sum of squared gradients.

    ``accum += grad ** 2; value -= learning_rate * grad / sqrt(accum)``. The slot is
    "accumulator".

    An `IndexedSlices` has the same effect as an array that is zero elsewhere.

    Args:
        learning_rate, name: As in `Rule`.
        initial_accumulator_value: More than 0.

    Source: Duchi, Hazan and Singer, Adaptive Subgradient Methods for Online Learning
    and Stochastic Optimization, 2011; TensorFlow's AdagradOptimizer.
    """

    __slots__ = ("_initial",)

    _kernel = "adagrad"

    def __init__(
        self,
        learning_rate: Rate,
        initial_accumulator_value: float = 0.1,
        name: str = "Adagrad",
    ) -> None:
        super().__init__(learning_rate, name)
        title = "initial_accumulator_value"
        self._initial = checked_number(initial_accumulator_value, title, 0)
        if self._initial == 0:
            raise InvalidArgumentError(f"{title} must be more than 0, got 0")

    def _options(self) -> dict[str, Any]:
        return {"initial_accumulator_value": self._initial}

    def _slots(self) -> dict[str, float]:
        return {"accumulator": self._initial}

    def _update(self, value: Array, grad: Array, *rest: Any) -> None:
        accum, scratch, rate = rest
        np.multiply(grad, grad, scratch)
        np.add(accum, scratch, accum)
        np.sqrt(accum, scratch)
        np.divide(grad, scratch, scratch)
        np.multiply(scratch, rate, scratch)
        np.subtract(value, scratch, value)


class Adam(Rule):
    """Adam; with ``weight_decay``, AdamW.

    With t the number of updates of this variable, including this one::

        m = beta1 * m + (1 - beta1) * grad
        v = beta2 * v + (1 - beta2) * grad ** 2
        rate = learning_rate * sqrt(1 - beta2**t) / (1 - beta1**t)
        value -= learning_rate * weight_decay * value
        value -= rate * m / (sqrt(v) + epsilon)

    The slots are "m" and "v"; t is the variable "step" of `variables`. Epsilon is
    that of the paper's section 2 ("epsilon hat"), not of its algorithm 1.

    With an `IndexedSlices`, m, v and the value change in its rows only, and only these
    rows decay, as in TensorFlow's LazyAdamOptimizer; with an array that is zero
    elsewhere, all rows change. In both cases t counts all updates of the variable.

    Args:
        learning_rate, name: As in `Rule`.
        beta1, beta2: At least 0, less than 1.
        epsilon: At least 0.
        weight_decay: At least 0.

    Source: Kingma and Ba, Adam, arXiv:1412.6980; Loshchilov and Hutter, Decoupled
    Weight Decay Regularization, arXiv:1711.05101; TensorFlow's AdamOptimizer.
    """

    __slots__ = ("_beta1", "_beta2", "_epsilon", "_weight_decay")

    _counts = True
    _kernel = "adam"

    def __init__(
        self,
        learning_rate: Rate = 1e-3,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        weight_decay: float = 0.0,
        name: str = "Adam",
    ) -> None:
        super().__init__(learning_rate, name)
        self._beta1 = checked_number(beta1, "beta1", 0, 1)
        self._beta2 = checked_number(beta2, "beta2", 0, 1)
        self._epsilon = checked_number(epsilon, "epsilon", 0)
        self._weight_decay = checked_number(weight_decay, "weight_decay", 0)

    def _options(self) -> dict[str, Any]:
        return {
            "beta1": self._beta1,
            "beta2": self._beta2,
            "epsilon": self._epsilon,
            "weight_decay": self._weight_decay,
        }

    def _slots(self) -> dict[str, float]:
        return {"m": 0.0, "v": 0.0}

    def _numbers(self, rate: float, step: int) -> tuple[float, ...]:
        correction = math.sqrt(1 - self._beta2**step) / (1 - self._beta1**step)
        return rate * correction, rate * self._weight_decay

    def _constants(self) -> tuple[float, ...]:
        beta1, beta2 = self._beta1, self._beta2
        return (beta1, 1 - beta1, beta2, 1 - beta2, self._epsilon)

    def _update(self, value: Array, grad: Array, *rest: Any) -> None:
        m, v, scratch, rate, decay = rest
        np.multiply(m, self._beta1, m)
        np.multiply(grad, 1 - self._beta1, scratch)
        np.add(m, scratch, m)
        np.multiply(v, self._beta2, v)
        np.multiply(grad, grad, scratch)
        np.multiply(scratch, 1 - self._beta2, scratch)
        np.add(v, scratch, v)
        if decay:
            np.multiply(value, decay, scratch)
            np.subtract(value, scratch, value)
        np.sqrt(v, scratch)
        np.add(scratch, self._epsilon, scratch)
        np.divide(m, scratch, scratch)
        np.multiply(scratch, rate, scratch)
        np.subtract(value, scratch, value)
