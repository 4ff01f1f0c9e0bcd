"""After MPI.Finalize(), and before MPI.Init(), every use raises an error.

MPI would end the job.
"""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.mpi

AFTER = """
import numpy as np
import hpcaccum as hpc
from mpi4py import MPI

layout = hpc.Layout({"x": (5,)}, "float32")
one = lambda: (1.0, [np.ones(3)])
uses = {
    "new reducer": lambda: hpc.Reducer(layout),
    "new accumulator": lambda: hpc.ConditionalAccumulator("float32", (5,)),
    "new group": lambda: hpc.group_of(MPI.COMM_WORLD),
    "new optimizer": lambda: hpc.CrossShardOptimizer(hpc.SGD(1.0)),
    "new rows": lambda: hpc.SparseConditionalAccumulator("float32", (5, 2), capacity=9),
    "new server": lambda: hpc.SyncReplicasOptimizer(hpc.SGD(1.0), 1),
    "new trace": lambda: hpc.trace("trace.json").__enter__(),
}
"""
OPEN = """
variable = hpc.Variable(np.ones(3), "v")
group, reducer = hpc.group_of(), hpc.Reducer(layout)
accumulator = hpc.ConditionalAccumulator("float32", (5,))
shard = hpc.CrossShardOptimizer(hpc.SGD(1.0))
ready = hpc.CrossShardOptimizer(hpc.SGD(1.0))
ready.initialize([variable])
dropping = hpc.DropStaleGradientOptimizer(hpc.SGD(1.0), 1)
dropping.initialize([variable])
uses |= {
    "reduce": reducer.reduce,
    "start": lambda: reducer.start("x"),
    "apply": lambda: accumulator.apply_grad(np.ones(5)),
    "take": lambda: accumulator.take_grad(1),
    "count": lambda: accumulator.num_accumulated(),
    "minimize": lambda: shard.minimize(one, var_list=[variable]),
    "minimize again": lambda: ready.minimize(one, var_list=[variable]),
    "update": lambda: dropping.minimize(one, var_list=[variable]),
    "exchange": lambda: group.allgather(1, "x"),
    "old group": lambda: hpc.Reducer(layout, group),
}
"""
CHECK = """
MPI.Finalize()
for name, use in uses.items():
    try:
        found = use()
    except hpc.FreedError as error:
        assert "\\n" not in str(error)
    else:
        raise AssertionError(f"{name} returned {found}")
for each in list(globals().values()):
    repr(each)
    if isinstance(each, (hpc.Reducer, hpc.ConditionalAccumulator)):
        each.free()
print("all of them")
"""


@pytest.mark.parametrize("made", [True, False], ids=["open", "never loaded"])
def test_use_after_finalize_is_an_error(made, mpirun, script, tmp_path):
    program = script(AFTER + (OPEN if made else "") + CHECK)
    result = mpirun(2, program, cwd=tmp_path, status=0)

    assert result.stdout.count("all of them") == 2


BEFORE = """
import mpi4py
mpi4py.rc.initialize = False
{after}
from hpcaccum import cli
getter = hpc.AGNCustomGetter()
variable = hpc.get_variable("v", np.ones(3), custom_getter=getter)
uses["new AGN"] = lambda: hpc.AGNOptimizer(hpc.SGD(1.0), 1, getter)
for name, use in uses.items():
    try:
        found = use()
    except RuntimeError as error:
        assert "call mpi4py.MPI.Init() before" in str(error), error
    else:
        raise AssertionError(f"{{name}} returned {{found}}")
for command in ["bench", "step"], ["doctor", "--probe", "threads"]:
    try:
        found = cli.main(command)
    except SystemExit as error:
        assert error.code == 1
    else:
        raise AssertionError(found)
MPI.Init()
for use in uses.values():
    use()
MPI.Finalize()
print("all of them")
"""


def test_use_before_init_is_an_error_and_after_it_works(mpirun, script, tmp_path):
    program = script(BEFORE.format(after=AFTER))
    result = mpirun(2, program, cwd=tmp_path, status=0)

    assert result.stdout.count("all of them") == 2
    assert result.stdout.count("hpcaccum: error: MPI is not initialized") == 4
