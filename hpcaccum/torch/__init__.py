"""PyTorch: any optimizer of `torch.optim` in one of the five strategies.

`CrossShard`, `SyncReplicas`, `DropStale`, `AGN` and `LocalSteps` hold a torch optimizer
and take its place in a training loop. `adapter` is what they have in common,
`one_sided` the base of all but the first. `rule` lets a torch optimizer update the
center of a server, `parameters` are variables for the exchange, which has their
gradients. `buffers` combines the buffers of a module, and `state` is what `state_dict`
returns. `tensors` maps tensors to arrays.

Imports `optimizers` and the packages below it. Only a benchmark of PyTorch imports this
package, so that only those who use it need PyTorch.
"""

from __future__ import annotations

try:
    import torch  # noqa: F401
except (ImportError, OSError) as error:
    raise ImportError(
        f"hpcaccum.torch needs PyTorch: {error} (pip install 'hpcaccum[torch]')"
    ) from None

from hpcaccum.torch.cross_shard import CrossShard
from hpcaccum.torch.one_sided import AGN, DropStale, LocalSteps, SyncReplicas

__all__ = ["AGN", "CrossShard", "DropStale", "LocalSteps", "SyncReplicas"]
