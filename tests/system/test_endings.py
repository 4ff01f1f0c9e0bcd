"""Ranks that exit early, or late, do not leave the others waiting."""

from __future__ import annotations

import pytest

TRAINS = """
w = hpc.Variable(np.zeros({size}, np.float32), "w")
opt = hpc.CrossShardOptimizer(hpc.SGD(0.1), name="shards")
for step in range(100):
    opt.minimize(lambda: (0.0, [np.ones({size}, np.float32)]), var_list=[w])
    if step == 5 and rank == {odd}:
        {end}
"""

LEAVES_A_TAKE = """
acc = hpc.ConditionalAccumulator("float32", (2,), name="grads")
if rank == 1:
    sys.exit("enough")
acc.apply_grad([1, 2])
if rank == 0:
    print(acc.take_grad(3))
"""

NEVER_ENDS = """
acc = hpc.ConditionalAccumulator("float32", (2,), name="grads")
if rank == 1:
    time.sleep(1000)
"""

SUMS_WHILE_OTHERS_TRAIN = """
w = hpc.Variable(np.zeros(4), "w")
opt = hpc.DropStaleGradientOptimizer(hpc.SGD(0.1), staleness=1000)
opt.initialize([w])
loss = lambda: (0.0, [np.ones(4)])
for call in comm.allreduce, comm.reduce, comm.scan:
    if rank > 0:
        # Rank 0, which serves, is in the sum before the others train.
        time.sleep(0.3)
        for _ in range(20):
            opt.minimize(loss)
    assert call(1) in (None, size, rank + 1)
opt.free()
print("done")
"""


@pytest.mark.parametrize(
    ("odd", "size", "end"),
    [
        (2, 8, "sys.exit('enough')"),
        (0, 8, "break"),
        (0, 100_000, "raise SystemExit(3)"),
    ],
)
def test_rank_that_exits_ends_the_job_for_those_that_wait(
    mpirun, program, odd, size, end
):
    result = mpirun(3, program(TRAINS.format(odd=odd, size=size, end=end)))

    assert result.returncode != 0
    assert "ranks make different calls: " in result.stdout
    ending = f"rank {odd} in 'shards (number 1): free (at the end of its program)'"
    assert ending in result.stdout
    assert "'shards (number 1): reduction 7'" in result.stdout
    assert ("enough" in result.stdout) == ("enough" in end)


def test_take_does_not_wait_for_gradients_of_a_rank_that_exits(mpirun, program):
    result = mpirun(3, program(LEAVES_A_TAKE))

    assert "enough" in result.stdout
    assert "[1. 2.]" in result.stdout


def test_timeout_at_the_end_of_a_program_ends_the_job_and_says_why(mpirun, program):
    env = {"HPCACCUM_TIMEOUT": "1"}
    result = mpirun(3, program(NEVER_ENDS), env=env)

    assert result.returncode != 0
    assert "grads (number 1): free" in result.stdout
    assert "Traceback" not in result.stdout
    assert "for rank 1 of 3 to make the same call" in result.stdout


def test_a_rank_without_an_output_ends_the_job(mpirun, program):
    end = "sys.stdout = None; raise ValueError"
    result = mpirun(2, program(TRAINS.format(odd=1, size=8, end=end)))

    assert result.returncode != 0
    assert "rank 1 of 2 failed, ending the job:" in result.stdout
    assert result.stdout.count("Traceback") == 1


def test_host_sums_objects_while_others_train(mpirun, program):
    result = mpirun(3, program(SUMS_WHILE_OTHERS_TRAIN), status=0)

    assert result.stdout.count("done") == 3
