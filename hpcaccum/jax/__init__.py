"""Training with JAX and optax: pytrees, and the update rules of optax.

`average` returns an optax transformation that averages over the ranks; `mean` averages
any value, and `broadcast` sends that of one rank to all. `DropStale`, `SyncReplicas`,
`AGN` and `LocalSteps` keep the parameters on a server, where a rule of optax updates
them. `structure` maps pytrees to named arrays, and `rule` calls optax.

Imports `optimizers` and the packages below it. Nothing else imports this package, so
that only those who use it need JAX.
"""

from __future__ import annotations

try:
    from hpcaccum.jax.averaging import average, broadcast, mean
    from hpcaccum.jax.one_sided import AGN, DropStale, LocalSteps, SyncReplicas
except ModuleNotFoundError as error:
    raise ImportError(
        f"hpcaccum.jax needs JAX and optax: {error} (pip install 'hpcaccum[jax]')"
    ) from None

__all__ = [
    "AGN",
    "DropStale",
    "LocalSteps",
    "SyncReplicas",
    "average",
    "broadcast",
    "mean",
]
