"""With too few communicators, construction raises on every rank and does not crash."""

from __future__ import annotations

PROGRAM = """
import sys
from mpi4py import MPI
import hpcaccum as hpc

comm, taken = MPI.COMM_WORLD, []
with hpc.ConditionalAccumulator("f4", (4,)):
    try:
        while len(taken) < 2100:
            taken.append(comm.Dup())
    except MPI.Exception:
        try:
            # Words on another rank than those of the first one need a window.
            hpc.ConditionalAccumulator("f4", (4,), host=1)
        except RuntimeError as error:
            assert "1 objects of hpcaccum are open" in str(error), error
    for each in taken:
        each.Free()
    hpc.ConditionalAccumulator("f4", (4,)).free()
sys.stdout.write("went on\\n")
"""


def test_objects_without_a_communicator_are_refused_on_every_rank(mpirun, tmp_path):
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    result = mpirun(2, script, env={"MPIR_CVAR_NOLOCAL": "0"})

    assert result.returncode == 0, result.stdout
    assert result.stdout.count("went on") == 2
