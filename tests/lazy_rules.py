"""The update rules with gradients of rows, as formulas in float64."""

from __future__ import annotations

from typing import Any

import numpy as np

from hpcaccum import SGD, Adagrad, Adam, Momentum

Array = np.ndarray[Any, Any]

MAKERS = {
    "SGD": lambda: SGD(0.5),
    "Momentum": lambda: Momentum(0.5, 0.75),
    "Nesterov": lambda: Momentum(0.5, 0.75, use_nesterov=True),
    "Adagrad": lambda: Adagrad(0.5),
    "Adam": lambda: Adam(0.25),
    "AdamW": lambda: Adam(0.25, weight_decay=0.5),
}


class LazyRule:
    """One variable and its slots; an update changes only the rows of a gradient.

    Args:
        rule: A name of `MAKERS`.
        value: The first value.
    """

    def __init__(self, rule: str, value: Any) -> None:
        self.rule, self.t = rule, 0
        x = self.value = np.array(value, np.float64)
        self.m, self.v, self.accum = np.zeros_like(x), np.zeros_like(x), x * 0 + 0.1

    def update(self, indices: Any, values: Any) -> None:
        """Update the rows of a gradient; those that it repeats are added."""
        x, m, v, accum = self.value, self.m, self.v, self.accum
        dense = np.zeros_like(x)
        np.add.at(dense, np.asarray(indices, np.int64), values)
        r = np.unique(np.asarray(indices, np.int64))
        g = dense[r]
        self.t += 1
        if self.rule == "SGD":
            x[r] -= 0.5 * g
        elif self.rule in ("Momentum", "Nesterov"):
            m[r] = 0.75 * m[r] + g
            x[r] -= 0.5 * (m[r] if self.rule == "Momentum" else g + 0.75 * m[r])
        elif self.rule == "Adagrad":
            accum[r] += g**2
            x[r] -= 0.5 * g / np.sqrt(accum[r])
        else:
            m[r], v[r] = 0.9 * m[r] + 0.1 * g, 0.999 * v[r] + 0.001 * g**2
            rate = 0.25 * np.sqrt(1 - 0.999**self.t) / (1 - 0.9**self.t)
            x[r] -= 0.25 * (0.5 if self.rule == "AdamW" else 0) * x[r]
            x[r] -= rate * m[r] / (np.sqrt(v[r]) + 1e-8)

    def slots(self) -> dict[str, Array]:
        """Return the slots, by name."""
        return {
            "SGD": {},
            "Adagrad": {"accumulator": self.accum},
            "Adam": {"m": self.m, "v": self.v},
            "AdamW": {"m": self.m, "v": self.v},
        }.get(self.rule, {"momentum": self.m})
