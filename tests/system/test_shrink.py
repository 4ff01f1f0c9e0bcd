"""Ranks of a cross-shard optimizer are killed, and the others go on without them."""

from __future__ import annotations

import re
from itertools import product

import pytest

from hpcaccum.errors import RESTART

from ..common import every_second
from .conftest import BEGIN

# Ranks are killed in an update, before or after a call of a function. The others
# compare their variables after each update with those of tests/naive.py, and find out
# which ranks it has counted.
KILLED = (
    BEGIN
    + """
import functools, itertools
from tests import internals, naive

length, place, when, mode = int(sys.argv[1]), *sys.argv[2:5]
# The step in which each rank is killed that is.
kills = {int(each[0]): int(each[1]) for each in sys.argv[5].split(",")}
armed = False
close = functools.partial(np.allclose, atol=1e-5)

def die():
    if armed:
        os.kill(os.getpid(), signal.SIGSTOP if mode == "stop" else signal.SIGKILL)

def act(moment, args):
    if when == "half" and moment == "before" and armed:
        # The first array of a sum is the place of the result.
        next(a for a in args if isinstance(a, np.ndarray))[:3] = np.nan
        die()
    if moment == when:
        die()

if rank in kills:
    internals.around(place, act)

def gradient(rank, step):
    values = np.random.default_rng([rank, step]).standard_normal(length)
    return values.astype(np.float32)

weights = [4.0, 1.0, 0.5, 2.0] if mode == "weights" else [1.0] * 4

def counted(found, among, mean, same=np.array_equal):
    for lost in range(len(among)):
        for ranks in itertools.combinations(among, len(among) - lost):
            given = [gradient(each, step) for each in ranks]
            if same(found, mean(given, [weights[each] for each in ranks])):
                return ranks
    raise AssertionError((step, among, found[:4]))

w = hpc.Variable(np.zeros(length, np.float32), "w")
ranks = present = range(size)
found = ""
"""
)

# With "drop", a gradient of rank 0 is dropped twice: when the others are killed, and
# later on.
PROGRAM = (
    KILLED
    + """
drops = "drop" if mode == "drop" else "accept"
opt = hpc.CrossShardOptimizer(hpc.SGD(1.0), on_loss="shrink", on_nonfinite=drops)
opt.initialize([w])
for step in range(9):
    armed = step == kills.get(rank)
    before, mine = w.value.copy(), gradient(rank, step)
    skips = mode == "drop" and step in (4, 6)
    if skips and rank == 0:
        mine[0] = np.nan
    if mode == "in place":
        opt.gradient_arrays()["w"][...] = mine
        mine = opt.gradient_arrays()["w"]
    if mode == "leave" and armed or mode == "leave later" and step == 8 and rank == 1:
        opt.leave()
    if mode == "disagree" and step == 7:
        opt.learning_rate = 1 + rank
        try:
            opt.minimize(lambda: (0.0, [mine]), var_list=[w])
            raise AssertionError("an update with two learning rates")
        except hpc.DisagreementError as error:
            assert "rank 0 has 1, rank 1 has 2" in str(error), error
        opt.learning_rate = 1.0
    if mode == "two calls":
        opt.apply_gradients(opt.compute_gradients(lambda: (0.0, [mine]), [w]))
    else:
        weight = weights[rank]
        opt.minimize(lambda: (0.0, [mine]), var_list=[w], weight=weight)
    same = close if mode in ("two calls", "weights") or skips else np.array_equal
    among = present[1:] if skips else present
    mean = lambda given, weights: before - naive.allreduce(given, weights=weights)
    used = counted(w.value, among, mean, same)
    found += "".join(map(str, used)) + " "
    present = (0, *used) if skips else used
assert opt.global_step == 9
expected = tuple(found.count(str(each)) for each in ranks)
assert opt.statistics().accepted == expected, opt.statistics()
opt.free()
print(f"rank {rank} counted {found}", flush=True)
"""
)

REDUCER = (
    KILLED
    + """
layout = hpc.Layout.of({"a": w.value})
sums = hpc.Reducer(layout, reduction_type="SUM", on_loss="shrink")
for step in range(9):
    armed = step == kills.get(rank)
    if mode == "start":
        sums.start("a", gradient(rank, step))
        total = sums.wait()["a"]
    else:
        out = np.zeros(length, np.float32)
        total = sums.reduce({"a": gradient(rank, step)}, out={"a": out})["a"]
        assert np.array_equal(out, total)
    present = counted(total, present, lambda given, _: naive.allreduce(given, "SUM"))
    assert tuple(sums.counted) == present
    found += "".join(map(str, present)) + " "
sums.free()
print(f"rank {rank} counted {found}", flush=True)
"""
)

GROUPS = PROGRAM.replace(
    'on_loss="shrink",', 'on_loss="shrink", group_assignment=[[1, 0], [2, 3]],'
).replace("range(size)", "[(1, 0), (2, 3)][rank // 2]")
# A group may be at its end when another one loses a rank.
GROUPS = GROUPS.replace(
    "opt.free()", "while not hpc.group_of(comm).lost:\n    time.sleep(0.01)\nopt.free()"
)

SMALL, LARGE = 100, 700_000

# Before and after the gradient of a rank is there for the others.
WITHOUT = [
    (SMALL, "reducer.one_shot.OneShot._all_agree", "before"),
    (LARGE, "reducer.schedule.Schedule.copy_in", "after"),
    (LARGE, "reducer.two_shot.NodeSum.contribute", "before"),
]
WITH = [
    (SMALL, "reducer.one_shot.AtomicWords.store", "after"),
    (SMALL, "reducer.one_shot.add_at_once", "half"),
    (SMALL, "reducer.one_shot.OneShot.finish", "after"),
    (LARGE, "reducer.two_shot.NodeSum.contribute", "after"),
    (LARGE, "reducer.two_shot.add_in_order", "half"),
    (LARGE, "reducer.two_shot.NodeSum.report", "before"),
    (LARGE, "reducer.two_shot.NodeSum.report", "after"),
    (LARGE, "reducer.two_shot.NodeSum.end", "after"),
]
# One case of each schedule.
LATE = WITHOUT[0], WITHOUT[2]
HALF = WITH[4]


@pytest.fixture
def start(mpirun, script):
    def run(program, ranks, case, mode="copied", kills="", **env):
        env |= {"HPCACCUM_TIMEOUT": "30"}
        args = *case, mode, kills or f"{ranks - 1}4"
        return mpirun(ranks, script(program), *args, survive=True, env=env, timeout=120)

    return run


@pytest.fixture
def counted(start):
    """Run a program; return the ranks that each update has counted.

    All ranks that are not lost have counted the same.
    """

    def run(program, ranks, *args, lost=1):
        output = start(program, ranks, *args).stdout
        assert "Traceback" not in output, output
        ends = dict(re.findall(r"rank (\d) counted ([\d ]+)", output))
        assert len(ends) == ranks - lost, output
        assert len({*ends.values()}) == 1, ends
        assert f"; {ranks - lost} of {ranks} ranks go on" in output
        return ends["0"].split()

    return run


def all_of(ranks, updates, later):
    """Return what is counted: all ranks in some updates, and others later."""
    return ["0123"[:ranks]] * updates + [later] * (9 - updates)


@pytest.mark.parametrize(
    ("ranks", "case"),
    every_second([*((3, each) for each in WITHOUT), *zip((2, 4), LATE, strict=True)]),
)
def test_a_gradient_that_was_not_there_is_left_out(counted, ranks, case):
    assert counted(PROGRAM, ranks, case) == all_of(ranks, 4, "012"[: ranks - 1])


@pytest.mark.parametrize(
    ("ranks", "case"),
    every_second([*((3, each) for each in WITH), *product((2, 4), [HALF])]),
)
def test_a_gradient_that_was_there_counts(counted, ranks, case):
    assert counted(PROGRAM, ranks, case) == all_of(ranks, 5, "012"[: ranks - 1])


@pytest.mark.parametrize(
    ("mode", "case"),
    [
        ("in place", LATE[0]),
        ("two calls", LATE[1]),
        ("weights", LATE[0]),
        ("weights", LATE[1]),
        ("drop", LATE[0]),
        ("disagree", LATE[1]),
    ],
)
def test_all_ways_to_update_go_on(counted, case, mode):
    expected = all_of(3, 4, "01")
    if mode == "drop":
        expected[4] = expected[6] = "1"

    assert counted(PROGRAM, 3, case, mode) == expected


def test_a_rank_that_is_lost_while_it_leaves_is_left_out(counted):
    case = LATE[1][0], "reducer.reducer.Reducer._explain", "before"

    assert counted(PROGRAM, 3, case, "leave") == all_of(3, 4, "01")


@pytest.mark.parametrize(("mode", "case"), [("start", LATE[1]), ("reduce", LATE[0])])
def test_sums_of_a_reducer_go_on(counted, case, mode):
    assert counted(REDUCER, 3, case, mode) == all_of(3, 4, "01")


@pytest.mark.parametrize(
    ("kills", "case"),
    every_second([("14,24", LATE[0]), ("14,25", LATE[1]), ("24,16", HALF)]),
)
def test_two_ranks_are_lost(counted, case, kills):
    """Also one that sums what the other had to sum."""
    found = counted(PROGRAM, 4, case, "copied", kills, lost=2)

    assert found[:4] == ["0123"] * 4
    assert found[-2:] == ["03"] * 2
    assert sorted(found, key=len, reverse=True) == found


@pytest.mark.parametrize("case", [WITH[2], WITH[-1]])
def test_a_rank_is_lost_after_its_last_update(counted, case):
    assert counted(PROGRAM, 3, case, "copied", "28") == all_of(3, 9, "")


def test_a_group_loses_a_rank(start):
    output = start(GROUPS, 4, WITHOUT[0]).stdout

    assert "Traceback" not in output, output
    ends = dict(re.findall(r"rank (\d) counted ([\d ]+)", output))
    assert ends["0"] == ends["1"] == "10 " * 9
    assert ends["2"] == "23 " * 4 + "2 " * 5


@pytest.mark.parametrize(
    ("mode", "kills", "text"),
    [
        ("copied", "04", r"rank 0 \(process .*\) is lost: its process has ended"),
        ("leave later", "24", r"a new group, which needs all ranks: rank 2 "),
    ],
)
def test_what_cannot_go_on_ends_with_a_status(start, mode, kills, text):
    result = start(PROGRAM, 3, WITHOUT[0], mode, kills)

    assert result.returncode & RESTART == RESTART, result.stdout
    assert re.search(text, result.stdout), result.stdout
    assert "Traceback" not in result.stdout
    assert " counted " not in result.stdout


CONTINUE = """
stopped = comm.bcast(os.getpid(), size - 1)
minimize = hpc.CrossShardOptimizer.minimize

def update(*args, **options):
    try:
        return minimize(*args, **options)
    except hpc.LostRankError:
        os.kill(stopped, signal.SIGCONT)
        raise

hpc.CrossShardOptimizer.minimize = update
"""


def test_a_rank_that_lives_may_not_be_left_out(start):
    program = PROGRAM.replace(KILLED, KILLED + CONTINUE)
    result = start(program, 3, WITHOUT[2], "stop", HPCACCUM_HEARTBEAT="3")

    assert result.returncode == RESTART
    assert "Traceback" not in result.stdout
    assert "is lost: no heartbeat for 3 s" in result.stdout
    assert " counted " not in result.stdout
