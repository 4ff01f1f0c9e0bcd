"""What all tests share: how hypothesis draws examples, how long bytes are compared."""

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


def pytest_assertrepr_compare(op: str, left: object, right: object) -> list[str] | None:
    """Explain long bytes by their first difference; pytest's diff takes minutes."""
    if op != "==" or not (isinstance(left, bytes) and isinstance(right, bytes)):
        return None
    pairs = enumerate(zip(left, right, strict=False))
    first = next((n for n, (a, b) in pairs if a != b), min(len(left), len(right)))
    return [f"{len(left)} and {len(right)} bytes that first differ at byte {first}"]
