"""What README.md and docs/ promise: programs run as printed, messages exist."""

from __future__ import annotations

import os
import re

import numpy as np
import pytest

import hpcaccum
from hpcaccum import checkpoint

from .conftest import REPOSITORY

PAGES = {
    path.stem: path.read_text()
    for path in (
        REPOSITORY / "README.md",
        REPOSITORY / "CONTRIBUTING.md",
        *sorted((REPOSITORY / "docs").glob("*.md")),
    )
}
PYTHON = re.compile(r"```python\n(.*?)```", re.DOTALL)
PROGRAMS = {
    f"{page}-{number}": program
    for page, text in PAGES.items()
    for number, program in enumerate(PYTHON.findall(text))
}
# They need libraries of their own: tests/examples runs them.
OF_ADAPTERS = {
    name
    for name, program in PROGRAMS.items()
    if re.search(r"^import (torch|jax)", program, re.MULTILINE)
}
ON_A_GPU = {name for name, program in PROGRAMS.items() if "import cupy" in program}
SOURCES = [path.read_text() for path in (REPOSITORY / "hpcaccum").rglob("*.py")]


def table(page, heading):
    """Return the rows of the first table below a heading, without its head."""
    _, _, below = PAGES[page].partition(f"\n## {heading}\n")
    rows = re.search(r"(?:^\|.*\n)+", below, re.MULTILINE).group().splitlines()[2:]
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows]


@pytest.mark.parametrize("name", sorted(PROGRAMS.keys() - ON_A_GPU - OF_ADAPTERS))
def test_program_runs_as_printed(mpirun, script, tmp_path, name):
    path = script(PROGRAMS[name])
    options = {"env": {"HPCACCUM_TIMEOUT": "20"}, "cwd": tmp_path, "status": 0}
    result = mpirun(3, path, **options)

    if name == "README-0":
        assert "step 150: loss 0.0" in result.stdout
        np.testing.assert_allclose(np.load(tmp_path / "parameters.npz")["w"], 1, 1e-3)
    for saved in tmp_path.glob("saved-*"):
        # From the first of its three checkpoints, on another number of ranks.
        for file in checkpoint.files(saved)[1:]:
            file.unlink()
        mpirun(2, path, **options)
        assert len(checkpoint.files(saved)) == 3


@pytest.mark.parametrize("name", sorted(ON_A_GPU))
def test_program_for_a_gpu_runs_as_printed(mpirun, script, simulator, name):
    environment = {
        "CUPY_SIMULATOR_DEVICES": "4",
        "HPCACCUM_TIMEOUT": "20",
        "PYTHONPATH": os.pathsep.join([str(REPOSITORY), simulator]),
    }

    mpirun(2, script(PROGRAMS[name]), env=environment, status=0)


def test_every_environment_variable_is_listed():
    used = set(re.findall(r"HPCACCUM_[A-Z_]+", "".join(SOURCES)))
    listed = re.findall(
        r"`([A-Z_]+)`", str(table("troubleshooting", "Environment variables"))
    )

    assert used == {name for name in listed if name.startswith("HPCACCUM_")}


def test_messages_under_troubleshooting_exist():
    # As the interpreter joins them; what is filled in is left out.
    joined = re.sub(r'"\s*\n\s*f?"|\\\n', "", "".join(SOURCES))
    joined = re.sub(r"\{[^{}]*\}", "...", joined)
    quoted = [
        re.findall(r"`([^`]+)`", row[0])
        for row in table("troubleshooting", "Messages")
        if row[0].startswith("`")
    ]

    assert len(quoted) >= 8
    for message in [part for row in quoted for part in row]:
        for fragment in re.split(r"\.\.\.|\d+ s|rank \d", message):
            assert fragment.strip() in joined, message


def test_every_public_name_is_on_the_page_of_the_api():
    found = re.findall(r"^::: hpcaccum\.([\w.]+)$", PAGES["api"], re.MULTILINE)
    objects = {name: getattr(hpcaccum, name) for name in hpcaccum.__all__}
    missing = [
        name
        for name, value in objects.items()
        if not {name, getattr(value, "__name__", "")} & {*found}
        and getattr(value, "__module__", "") != "hpcaccum.errors"
    ]

    assert "errors" in found
    assert not missing


def test_links_lead_to_files():
    for page, text in PAGES.items():
        folder = REPOSITORY if page.isupper() else REPOSITORY / "docs"
        for target in re.findall(r"\]\(([^)#:]+)\)", text):
            assert (folder / target).is_file(), f"{page}: {target}"


def test_files_that_a_contributor_is_sent_to_exist():
    for path in re.findall(r"`((?:[\w.]+/)+[\w.]*)`", PAGES["CONTRIBUTING"]):
        places = [REPOSITORY / path, REPOSITORY / "hpcaccum" / path]
        assert any(place.exists() for place in places), path
