"""What a parameter server takes its gradients from: an inbox, a policy of admission.

`QuorumInbox` passes on the gradients of a quorum together, `BoundedStalenessInbox` each
gradient separately. Another one has the same methods and attributes:

``adds``: Whether the gradients of several ranks are added. The parameters of an update
    are then sent to their nodes unasked.
``needs_all``: Whether each rank that has not left gives one gradient of each update, so
    that none is made without it.
``next``: Its block reads gradients, or none if all of them were given up. At the
    end, their ranks may write new ones. If it raises, the next call gives the same
    gradients again, without those on a node that is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hpcaccum.rows import RowPlace
from hpcaccum.server.bounded_staleness import BoundedStalenessInbox
from hpcaccum.server.quorum import QuorumInbox

Inbox = QuorumInbox | BoundedStalenessInbox
# Makes an inbox, given the size and the dtype of a gradient, and the places of rows in
# it.
MakeInbox = Callable[[int, np.dtype[Any], Sequence[RowPlace]], Inbox]
