"""The command ``hpcaccum train``: data-parallel training of a small network.

Imports the packages below it; the command line and `launch` import it.
"""

from __future__ import annotations
