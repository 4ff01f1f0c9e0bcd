"""Programs of other libraries and the same ones with hpcaccum, and what pages show."""

from __future__ import annotations

import difflib
import re
import sys

import numpy as np

from hpcaccum import checkpoint

from ..programs import run_program
from ..system.conftest import REPOSITORY
from ..system.test_documentation import PAGES

EXAMPLES = REPOSITORY / "examples"
ENV = {"HPCACCUM_TIMEOUT": "60"}


def lines(name):
    return (EXAMPLES / name).read_text().splitlines()


def test_the_page_shows_the_lines_that_differ():
    diff = difflib.unified_diff(
        lines("ddp_before.py"), lines("ddp_after.py"), n=0, lineterm=""
    )
    changed = [line for line in list(diff)[2:] if not line.startswith("@@")]
    [shown] = re.findall(r"```diff\n(.*?)```", PAGES["pytorch"], re.DOTALL)

    assert shown.splitlines() == changed


def test_the_page_shows_both_programs():
    shown = re.findall(r"```py\n(.*?)```", PAGES["tensorflow"], re.DOTALL)

    assert [each.splitlines() for each in shown] == [
        lines("tf1_before.py"),
        lines("tf1_after.py"),
    ]


def test_crossshard_trains_as_distributed_data_parallel(
    mpirun, mpi_environment, tmp_path
):
    # The name of a file is part of what PyTorch writes.
    one, other = tmp_path / "one", tmp_path / "other"
    for each in (one, other):
        each.mkdir()
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    program = EXAMPLES / "ddp_before.py"
    # PyTorch itself sometimes aborts when its ranks end.
    for _ in range(3):
        before = run_program(
            [*launcher, "--nproc-per-node", "2", str(program), "weights.pt"],
            timeout=200,
            cwd=one,
            env=mpi_environment,
        )
        if before.returncode == 0:
            break
    assert before.returncode == 0, before.stdout
    words = EXAMPLES / "ddp_after.py", "weights.pt"
    after = mpirun(2, *words, cwd=other, env=ENV, status=0)

    losses = [re.findall(r"loss ([\d.]+)", each.stdout) for each in (before, after)]
    assert losses[0] == losses[1]
    assert float(losses[1][-1]) < float(losses[1][0]) / 4
    # To the last bit: (a + b) / 2 is a / 2 + b / 2. Loading them would take PyTorch.
    saved = [(each / "weights.pt").read_bytes() for each in (one, other)]
    assert len(saved[0]) > 4 * 8 * 64
    assert saved[0] == saved[1]


def check_losses(output, number):
    found = {
        int(step): float(loss)
        for step, loss in re.findall(r"step (\d+): loss ([\d.]+)", output)
    }
    assert len(found) >= number, output
    assert found[max(found)] < found[min(found)] / 100, output


def test_a_server_and_two_workers(mpirun, tmp_path):
    program = EXAMPLES / "tf1_after.py"
    result = mpirun(3, program, cwd=tmp_path, env=ENV, status=0)

    check_losses(result.stdout, 10)
    saved = checkpoint.load(tmp_path / "tf1-checkpoints")["optimizer"]
    np.testing.assert_allclose(saved["variables"]["w"], 1, atol=1e-2)
    np.testing.assert_allclose(saved["variables"]["b"], 2, atol=1e-2)


def test_the_program_for_tensorflow_compiles():
    compile((EXAMPLES / "tf1_before.py").read_text(), "tf1_before.py", "exec")


def test_workers_of_a_data_loader(mpirun, tmp_path):
    """On one rank: each worker, and each rank, takes seconds to load PyTorch."""
    programs = re.findall(r"```py\n(.*?)```", PAGES["pytorch"], re.DOTALL)
    [program] = [each for each in programs if "__main__" in each]
    path = tmp_path / "program.py"
    path.write_text(program)

    mpirun(1, path, env=ENV, status=0)
