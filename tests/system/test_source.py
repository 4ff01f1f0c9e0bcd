"""House rules that a machine can check."""

from __future__ import annotations

import re

from .conftest import REPOSITORY

# Code people read; the words are in pieces so that this file keeps its own rules.
FILES = [
    path
    for folder in ("hpcaccum", "tests", "examples", "slurm", "kernels", ".ci")
    for path in sorted((REPOSITORY / folder).rglob("*"))
    if path.is_file() and "__pycache__" not in path.parts
]
UNFINISHED = re.compile(r"\b(TO" r"DO|FIX" r"ME|X" r"XX)\b")
SOMEBODYS_MACHINE = re.compile(r"(?<![\w.}])/(ho" r"me|Us" r"ers|ro" r"ot|wo" r"rk)/\w")


def test_house_rules():
    for path in FILES:
        text = path.read_text()
        assert not UNFINISHED.search(text), path
        assert not SOMEBODYS_MACHINE.search(text), path
        if path.is_relative_to(REPOSITORY / "hpcaccum"):
            assert text.count("\n") <= 600, f"look for a natural cut of {path}"
        assert text.endswith("\n") or not text, path
