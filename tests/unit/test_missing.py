"""Without the library of an adapter, the error names what to install."""

from __future__ import annotations

import importlib
import sys

import pytest


@pytest.mark.parametrize(
    ("library", "text"),
    [
        ("torch", r"pip install 'hpcaccum\[torch\]'"),
        ("jax", r"needs JAX and optax: .*hpcaccum\[jax\]"),
        ("optax", r"needs JAX and optax: .*hpcaccum\[jax\]"),
    ],
)
def test_the_error_names_the_extra(monkeypatch, library, text):
    adapter = "hpcaccum.torch" if library == "torch" else "hpcaccum.jax"
    for name in [name for name in sys.modules if name.startswith(adapter)]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, library, None)

    with pytest.raises(ImportError, match=text):
        importlib.import_module(adapter)
