"""Type checkers find mistakes in programs that use the package, and nothing else."""

from __future__ import annotations

import collections
import re
import subprocess
import sys

import pytest

from .conftest import REPOSITORY
from .test_documentation import OF_ADAPTERS, PROGRAMS

# The types of PyTorch and JAX are not read.
CHECKED = {name: PROGRAMS[name] for name in PROGRAMS.keys() - OF_ADAPTERS}

WRONG = """\
import numpy as np
import hpcaccum as hpc

w, grad = hpc.Variable(np.zeros(3), "w"), np.ones(3)
sgd, getter = hpc.SGD(0.1), hpc.AGNCustomGetter()
cross = hpc.CrossShardOptimizer(sgd)
drop = hpc.DropStaleGradientOptimizer(sgd, staleness=4)
acc = hpc.ConditionalAccumulator("float32", shape=3)
rows = hpc.SparseConditionalAccumulator("float32", (9, 3), capacity=4)

receipt = drop.minimize(lambda: (0.0, [grad]), var_list=[w])
receipt.acepted  # wrong
acc.apply_grad(grad).is_accepted  # wrong
drop.statistics().droped  # wrong

cross.apply_gradients([(w, grad)])  # wrong
sgd.apply_gradients([(w, grad)])  # wrong
hpc.clip_by_global_norm([(w, grad)], 1.0)  # wrong
acc.apply_grad(w)  # wrong
rows.apply_indexed_slices_grad(grad)  # wrong
hpc.IndexedSlices(w, [0])  # wrong

cross.minimize(lambda: (0.0, [grad]), var_list=[np.zeros(3)])  # wrong
cross.initialize([np.zeros(3)])  # wrong
drop.restore(drop.snapshot(), np.zeros)  # wrong
acc.restore("file")  # wrong
drop.learning_rate = "0.1"  # wrong
drop.center("w")  # wrong
cross.minimize(lambda: (0.0, [grad]), global_step=0)  # wrong
cross.minimize(lambda: [grad])  # wrong
cross.minimize(lambda: (0.0, [w]))  # wrong

hpc.Adam(0.1, beta_1=0.9)  # wrong
hpc.CrossShardOptimizer(sgd, group_assigment=[[0]])  # wrong
hpc.CrossShardOptimizer(sgd, on_nonfinite="dorp")  # wrong
hpc.SyncReplicasOptimizer(sgd, 2, servers="automatic")  # wrong
hpc.DropStaleGradientOptimizer(sgd, staleness="4")  # wrong
hpc.AGNOptimizer(sgd, 2, getter, comunication_period=5)  # wrong
acc.take_grad("1")  # wrong
"""

# What the programs of the pages do not do.
RIGHT = """\
import numpy as np
import hpcaccum as hpc

w = hpc.Variable(np.zeros(3, np.float32), "w")
v = hpc.Variable([1.0, 2.0], "v")
step = hpc.Variable(0, "step")


def loss() -> tuple[float, dict[str, np.ndarray]]:
    return 0.0, {"w": w.value, "v": v.value}


with hpc.CrossShardOptimizer(hpc.Momentum(0.1, 0.9, use_nesterov=True)) as cross:
    receipt = cross.minimize(loss, step, (w, v))
    if not receipt:
        print(receipt.reason, receipt.lag, receipt.loss)
    pairs, norm = hpc.clip_by_global_norm(cross.compute_gradients(loss, [w, v]), 1.0)
    cross.apply_gradients(pairs)
    cross.learning_rate = lambda step: 0.1 / (1 + step)
    cross.apply_gradients([([1, 2, 3], w), (None, v)])
    cross.apply_gradients(zip([[1.0, 2.0, 3.0]], [w]))
    cross.apply_gradients((np.ones(each.shape), each) for each in (w, v))
    print(sum(cross.statistics().accepted), cross.center(w).sum(), cross.waited)
    first, second = cross.center([w, v])

with hpc.SyncReplicasOptimizer(hpc.Adagrad(lambda: 0.1), 2, servers=[0]) as sync:
    sync.initialize(iter([w]))
    with sync.paused() as number:
        print(number + 1, sync.get_slot(w, "accumulator"))

with hpc.DropStaleGradientOptimizer(
    hpc.Adam(lambda step: 0.1 / (1 + step)), 4, servers="auto", on_nonfinite="drop"
) as drop:
    drop.restore(None, [w])
    print(drop.apply_gradients([(0.5, w)]).lag, drop.stale_counter)
    print(drop.statistics().lags.items())

with hpc.ConditionalAccumulator(np.float32, shape=[None, 3], capacity=12) as acc:
    receipt = acc.apply_grad([[1, 2, 3]], local_step=np.int64(0))
    mean = acc.take_grad(np.int64(1), timeout=1.0)
    print(receipt.accepted, mean.shape, acc.statistics())

with hpc.SparseConditionalAccumulator(np.float32, (9, 3), capacity=4) as rows:
    slices = hpc.IndexedSlices([[1, 2, 3]], np.array([8]), dense_shape=(9, 3))
    print(rows.apply_indexed_slices_grad(slices).lag, acc.apply_grad(slices).lag)
    indices, values, _ = rows.take_grad(1)
    hpc.SGD(0.1).apply_gradients([(slices, w)])
"""


@pytest.fixture(scope="module")
def reported(tmp_path_factory):
    """The lines that mypy reports in each program, by its name."""
    folder = tmp_path_factory.mktemp("programs")
    programs = {"wrong": WRONG, "right": RIGHT, **CHECKED}
    for name, program in programs.items():
        (folder / f"{name}.py").write_text(program)
    # From here, with the settings of `make lint` and what it left in its cache.
    files = sorted(map(str, folder.iterdir()))
    command = [sys.executable, "-m", "mypy", "--strict", *files]
    result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    print(result.stdout, result.stderr)
    found = collections.defaultdict(set)
    for name, line in re.findall(r"([\w-]+)\.py:(\d+): error:", result.stdout):
        found[name].add(int(line))
    return found


def test_each_mistake_is_reported(reported):
    lines = WRONG.splitlines()
    wrong = {number for number, line in enumerate(lines, 1) if "# wrong" in line}

    missed = [lines[number - 1] for number in sorted(wrong - reported["wrong"])]
    assert not missed
    assert reported["wrong"] == wrong


@pytest.mark.parametrize("name", ["right", *sorted(CHECKED)])
def test_nothing_else_is_reported(reported, name):
    assert not reported[name]
