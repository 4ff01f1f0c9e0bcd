"""Without PyTorch, the package works and its adapter names what to install."""

from __future__ import annotations

import importlib
import sys

import pytest


def test_the_error_names_the_extra(monkeypatch):
    monkeypatch.delitem(sys.modules, "hpcaccum.torch", raising=False)
    monkeypatch.setitem(sys.modules, "torch", None)

    with pytest.raises(ImportError, match=r"pip install 'hpcaccum\[torch\]'"):
        importlib.import_module("hpcaccum.torch")
