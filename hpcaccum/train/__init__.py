"""The command ``hpcaccum train``: data-parallel training of a small network.

Imports the public names of the packages below; only the command line imports it.
"""

from __future__ import annotations
