"""The command ``hpcaccum train``: data-parallel training of a small network.

Uses the packages below. The command line and `launch` import it.
"""

from __future__ import annotations
