"""What tests of all kinds share: how long to wait, how to compare. It needs no MPI."""

from __future__ import annotations

from typing import Any

import numpy as np

# Seconds a test waits for something that takes milliseconds.  Virtual machines stand
# still for a minute at times.  It is well below the time limit of a test, so that the
# message is the timeout's.
WAIT = 150.0

# Seconds of a wait that is meant to time out.
VAIN = 0.05


def same_bits(found: Any, expected: Any) -> None:
    """Compare values, shape and dtype."""
    expected = np.asarray(expected)
    assert isinstance(found, np.ndarray)
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    equal = found.tobytes() == expected.tobytes()
    # Not in one line: pytest would compute a diff of all bytes, which takes minutes.
    assert equal, f"{found} is not {expected}"
