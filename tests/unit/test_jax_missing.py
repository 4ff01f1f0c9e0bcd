"""`hpcaccum.jax` where JAX or optax is not installed."""

from __future__ import annotations

import importlib
import sys

import pytest


@pytest.mark.parametrize("library", ["jax", "optax"])
def test_the_error_names_the_extra(monkeypatch, library):
    for name in [name for name in sys.modules if name.startswith("hpcaccum.jax")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, library, None)

    with pytest.raises(ImportError, match=r"needs JAX and optax: .*hpcaccum\[jax\]"):
        importlib.import_module("hpcaccum.jax")
