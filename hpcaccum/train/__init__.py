"""The command ``hpcaccum train``: data-parallel training of a small network."""

from __future__ import annotations
