"""The programs of the pages with PyTorch and JAX, which the ranks of this test run.

As programs of their own, each rank would have to load these libraries again.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from ..mpi.support import meet
from ..system import test_documentation as pages

PAGE = (Path(__file__).parents[2] / "docs" / "pytorch.md").read_text()
# By their subjects, in bold print or in a heading.
PROGRAMS = {
    re.findall(r"^(?:\*\*|## )(.+?)(?:\.?\*\*.*)?$", PAGE[: found.start()], re.M)[-1]: (
        found[1]
    )
    for found in re.finditer(r"```py\n(.*?)```", PAGE, re.DOTALL)
    if "__main__" not in found[1]
}


def run(name):
    torch.manual_seed(0)
    exec(compile(PROGRAMS[name], name, "exec"), {"__name__": "__main__"})


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(meet(str(tmp_path))[0])


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_runs_as_printed(name):
    run(name)


@pytest.mark.parametrize("name", sorted(pages.OF_ADAPTERS))
def test_a_whole_program_runs_as_printed(name):
    exec(compile(pages.PROGRAMS[name], name, "exec"), {"__name__": "__main__"})


def test_a_training_continues_with_its_scheduler(rank):
    for number in (1, 2):
        run("Checkpoints")
        meet()
        state = torch.load("state.pt")
        assert state["optimizer"]["global_step"] == 10 * number
        assert state["scheduler"]["last_epoch"] == 10 * number
        [group] = state["optimizer"]["param_groups"]
        assert group["lr"] == 0.1 * 0.5 ** (10 * number // 8)
        meet()
