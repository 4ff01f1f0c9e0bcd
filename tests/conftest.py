"""What all tests share: hypothesis draws the same examples everywhere, every time."""

from __future__ import annotations

import os

import hypothesis

# The ranks of tests/mpi must draw alike.  So nothing may depend on the clock (the
# deadline, too_slow), on chance, on what an earlier run left on disk, or on the lines
# that a rank went through (explain).
hypothesis.settings.register_profile(
    "hpcaccum",
    derandomize=True,
    deadline=None,
    database=None,
    phases=set(hypothesis.Phase) - {hypothesis.Phase.explain},
    suppress_health_check=[
        hypothesis.HealthCheck.too_slow,
        hypothesis.HealthCheck.function_scoped_fixture,
    ],
)
hypothesis.settings.load_profile("hpcaccum")

# Tests set their own limits; that of the shell they were started from is not theirs.
os.environ.pop("HPCACCUM_TIMEOUT", None)
