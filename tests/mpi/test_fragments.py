"""LocalStepsOptimizer in fragments, and with pushes that overlap with local steps."""

from __future__ import annotations

import functools
import time

import ml_dtypes
import numpy as np
import pytest

import hpcaccum as hpc
from hpcaccum import group_of
from tests import internals

from .. import naive
from ..common import same_bits
from . import reducing
from .acting import until
from .support import meet
from .training import check_error, gives, raised, started, turns, variable

SHAPES = {"a": (40, 50), "b": (), "c": (1500,), "d": (90, 30), "e": (0,), "f": (700,)}
# Contiguous, and of about the same number of bytes.
FRAGMENTS = {
    1: ["abcdef"],
    2: ["abc", "def"],
    3: ["ab", "c", "def"],
    4: ["a", "bc", "d", "ef"],
}
INNER, OUTER = (0.125, 0.5), (0.75, 0.5)


drawn = functools.partial(reducing.drawn, SHAPES, dtype=np.float32)


def made():
    return [variable(each, np.float32, name) for name, each in drawn(9).items()]


@pytest.fixture
def make(make_one):
    kind, rule = hpc.LocalStepsOptimizer, hpc.Momentum
    return lambda comm, period, **options: make_one(
        kind, rule(*INNER), rule(*OUTER), period, comm=comm, **options
    )


def sgd(comm, period, outer=None, **options):
    """Return an optimizer whose updates subtract what they are given."""
    rules = hpc.SGD(1), outer or hpc.SGD(1)
    return hpc.LocalStepsOptimizer(*rules, period, comm=comm, **options)


class Plain:
    """The ranks of a job in lockstep, with a quorum of all."""

    def __init__(self, nodes, count, period, overlap=0, wire=None):
        self.nodes, self.period, self.overlap, self.wire = nodes, period, overlap, wire
        first = drawn(9)
        self.servers = [
            naive.Server({name: first[name] for name in names}, naive.Momentum(*OUTER))
            for names in FRAGMENTS[count]
        ]
        self.workers = [
            naive.FragmentsWorker(self.servers, naive.Momentum(*INNER))
            for _ in range(sum(map(len, nodes)))
        ]
        for rank, worker in enumerate(self.workers):
            if rank not in nodes[0]:
                worker._centers = [naive.rounded(c, wire) for c in worker._centers]
                for center in worker._centers:
                    worker.values.update({n: x.copy() for n, x in center.items()})
        self.call = 0

    def step(self):
        """Make a step of all ranks; return which fragments were pushed."""
        self.call += 1
        for rank, worker in enumerate(self.workers):
            worker.step(drawn(rank, self.call))
        if self.overlap:
            self.take()
        pushed = self.workers[0].due(self.call, self.period)
        for number in pushed:
            parts = [worker.difference(number) for worker in self.workers]
            mean = naive.mean_between(parts, self.nodes, self.wire)
            self.servers[number].update(mean)
        if not self.overlap:
            self.take()
        return pushed

    def take(self):
        for number in self.workers[0].due(self.call, self.period, self.overlap):
            for rank, worker in enumerate(self.workers):
                worker.take(number, None if rank in self.nodes[0] else self.wire)

    def center(self):
        return {n: each for server in self.servers for n, each in server.values.items()}


def check(variables, values):
    for var in variables:
        same_bits(var.value, values[var.name])


def train(opt, variables, plain, rank, calls):
    for _ in range(calls):
        number = plain.call + 1
        receipt = opt.minimize(gives(*drawn(rank, number).values()), var_list=variables)
        assert receipt.sent == bool(plain.step())
        check(variables, plain.workers[rank].values)


def play(make, comm, rank, count, overlap, wire=None, servers=0):
    nodes = group_of(comm).nodes
    options = {"fragments": count, "overlap": overlap, "wire_dtype": wire}
    opt = make(comm, 5, quorum=sum(map(len, nodes)), servers=servers, **options)
    dtype = None if wire is None else ml_dtypes.bfloat16
    variables, plain = made(), Plain(nodes, count, 5, overlap, dtype)
    with internals.limits(short=0):
        opt.initialize(variables)
        train(opt, variables, plain, rank, 13)
        opt.free()
    assert opt.global_step == sum(server.step for server in plain.servers)
    if wire is None or rank in nodes[0]:
        check(variables, plain.center())


@pytest.mark.parametrize("overlap", [0, 1, 3])
@pytest.mark.parametrize("count", FRAGMENTS)
@pytest.mark.any_size
def test_it_equals_the_plain_program_on_a_node(make, comm, rank, count, overlap):
    play(make, comm, rank, count, overlap)


@pytest.mark.parametrize("wire", [None, "bfloat16"])
@pytest.mark.parametrize(("count", "overlap"), [(1, 2), (3, 0), (4, 2)])
def test_it_equals_the_plain_program(group, make, rank, count, overlap, wire):
    play(make, group, rank, count, overlap, wire)


def test_several_servers_share_each_fragment(group, make, rank):
    play(make, group, rank, 3, 2, servers=[ranks[0] for ranks in group.nodes])


@pytest.mark.ranks(min=2)
def test_a_push_does_not_wait_with_overlap(group, make, rank, size):
    x = variable(np.ones(5000), np.float32)
    opt = started(make(group, 3, quorum=size, overlap=2), [x])
    meet()
    grads = gives(np.ones(5000, np.float32))
    if rank:
        assert [opt.minimize(grads).sent for _ in range(4)] == [0, 0, 1, 0]
    # Only now has rank 0 anything.
    meet()
    if not rank:
        assert [opt.minimize(grads).sent for _ in range(4)] == [0, 0, 1, 0]
    opt.minimize(grads)
    meet()
    assert opt.global_step == 1


@pytest.mark.parametrize("quorum", [False, True])
def test_the_answer_to_a_push_comes_meanwhile(group, make, rank, size, quorum):
    x = variable(np.ones(5000), np.float32)
    opt = make(group, 2, overlap=1, **({"quorum": size} if quorum else {}))
    opt.initialize([x])
    meet()
    for _ in range(2):
        opt.minimize(gives(np.ones(5000, np.float32)))
    # Nobody has pulled it.
    until(lambda: internals.step_here(opt) > 0)
    assert internals.own_step(opt) == 0
    meet()


@pytest.mark.ranks(min=2)
def test_without_a_quorum_each_fragment_has_its_own_lag(comm, rank, size):
    x = [variable(name=name) for name in "ab"]
    with started(sgd(comm, 2, fragments=2, staleness=1, lateness="inverse"), x) as opt:
        pairs = [(np.array(8.0), var) for var in x]

        def act(_):
            return opt.apply_gradients(pairs)

        # Rank 0 pushes b, a, b; the last rank's first push is of b.
        receipts = turns([0, 0, 0, size - 1], act)
        assert [(r.accepted, r.lag) for r in receipts] == [
            (True, 0), (True, 0), (True, 0), (False, 2)
        ]  # fmt: skip
        # Its push of a is late by one update.
        (receipt,) = turns([size - 1], act)
        assert (receipt.lag, receipt.factor) == (1, 0.5)
        assert opt.center(x) == [-16 - 8, -8 - 16]
        assert opt.statistics().dropped == (*[0] * (size - 1), 1)
        meet()


@pytest.mark.ranks(min=2)
def test_a_dropped_push_goes_on_with_the_newest_center(comm, rank, size):
    x = variable()
    with started(sgd(comm, 2, quorum=size - 1, overlap=1), [x]) as opt:
        late = rank == size - 1
        if not late:
            for _ in range(3):
                opt.minimize(gives(1.0))
            assert x.value == -3
        meet()
        if late:
            assert opt.minimize(gives(64.0)).accepted
            receipt = opt.minimize(gives(64.0))
            assert (receipt.accepted, receipt.lag) == (False, 1)
            opt.minimize(gives(4.0))
            assert x.value == -2 - 4
        meet()


@pytest.mark.any_size
def test_a_variable_without_gradients_is_not_pushed(make, comm, rank, size):
    v, w = variable(name="v"), variable(5.0, name="w")
    opt = sgd(comm, 4, quorum=size, overlap=1)
    for call in range(1, 9):
        # Rank 0 has one of w in the first period, and then while the push travels.
        of_w = 1.0 if (rank, call) in ((0, 1), (0, 5)) else None
        opt.minimize(gives(1.0, of_w), var_list=[v, w])
    opt.free()
    assert v.value == -8
    assert w.value == 3


@pytest.mark.any_size
@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_other_dtypes(comm, rank, size, dtype):
    x = [variable(np.zeros(3), dtype, name) for name in "ab"]
    with sgd(comm, 4, quorum=size, fragments=2, overlap=1) as opt:
        for _ in range(9):
            opt.minimize(gives(*np.ones((2, 3), dtype)), var_list=x)
        assert [each.value.tolist() for each in x] == [[-9] * 3] * 2
    assert [each.value.tolist() for each in x] == [[-8] * 3, [-6] * 3]


@pytest.mark.any_size
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("slow", [0, -1], ids=["host", "last"])
def test_a_rank_leaves_when_its_last_pushes_count(comm, rank, size, count, slow):
    x = [variable(np.zeros(3), name=name) for name in "ab"]
    options = {"quorum": size, "fragments": count, "overlap": 2, "comm": comm}
    with hpc.LocalStepsOptimizer(hpc.SGD(1), hpc.SGD(1), 4, **options) as opt:
        for _ in range(8):
            if rank == slow % size:
                time.sleep(0.01)
            opt.minimize(gives(*np.full((2, 3), 1.0 + rank)), var_list=x)
    assert opt.global_step == 2 * count
    assert opt.statistics().dropped == (0,) * size
    # Fragments are pushed in different calls, of which each is a step of 1 + rank.
    mean = 1 + (size - 1) / 2
    calls = [8, 6] if count == 2 else [8, 8]
    for each, number in zip(x, calls, strict=True):
        np.testing.assert_allclose(each.value, -number * mean, rtol=1e-6)


@pytest.mark.any_size
@pytest.mark.parametrize("count", [3, 1])
def test_a_snapshot_continues_with_any_fragments(make, comm, rank, size, count):
    variables, plain = made(), Plain(group_of(comm).nodes, 3, 6)
    opt = make(comm, 6, quorum=size, fragments=3, servers=0)
    train(opt, variables, plain, rank, 10)
    saved = opt.snapshot() if rank == 0 else None
    if rank == 0:
        # Fragment 1 was pushed at 2 and 8, 2 at 4 and 10, 0 at 6.
        assert saved["global_step"] == 5
        assert saved["tally"]["accepted"] == [5] * size
        same_bits(saved["variables"]["d"], plain.center()["d"])
        slot = plain.servers[1]._rule.slots["c"]
        same_bits(saved["state"]["c"]["momentum"], slot)
    opt.free()
    other = make(comm, 6, quorum=size, fragments=count, servers=0)
    other.restore(saved, variables)
    assert other.global_step == 5
    check(variables, plain.center())
    if rank == 0:
        again = other.snapshot()
        for name, parts in again["state"].items():
            assert parts["step"] == saved["state"][name]["step"]
            same_bits(parts["momentum"], saved["state"][name]["momentum"])
        assert again["tally"] == saved["tally"]
    meet()


@pytest.mark.any_size
def test_assign_undoes_local_steps_and_ends_flights(comm, rank, size):
    x = [variable(name=name) for name in "ab"]
    with sgd(comm, 4, quorum=size, fragments=2, overlap=3) as opt:
        # The push of b, at 2, is under way.
        for _ in range(3):
            opt.minimize(gives(1.0, 1.0), var_list=x)
        if rank == 0:
            for var in x:
                var.value[...] = 10
        opt.assign()
        assert [var.value for var in x] == [10, 10]
        for _ in range(2):
            opt.minimize(gives(2.0, 2.0))
        assert [var.value for var in x] == [6, 6]
    # a was pushed at 4, without the steps before.
    assert x[0].value == 8
    assert opt.global_step == 2


@pytest.mark.any_size
def test_paused_stops_all_fragments(make, comm, rank, size):
    x = [variable(name=name) for name in "ab"]
    opt = make(comm, 2, quorum=size, fragments=2)
    for _ in range(4):
        opt.minimize(gives(1.0, 1.0), var_list=x)
    if rank == 0:
        with opt.paused() as step:
            assert step == opt.global_step == 4
    meet()


@pytest.mark.any_size
def test_nonfinite_calls_do_not_count(comm, rank, size):
    x = [variable(name=name) for name in "ab"]
    with sgd(comm, 2, quorum=size, fragments=2, on_nonfinite="drop") as opt:
        for bad in (True, False, True, False):
            receipt = opt.minimize(gives(np.nan if bad else 1.0, 1.0), var_list=x)
            assert receipt.nonfinite == bad
        assert [var.value for var in x] == [-2, -2]
        meet()
        assert opt.statistics().nonfinite == (2,) * size


@pytest.mark.ranks(min=2)
def test_a_rank_that_ends_does_not_stop_other_fragments(comm, rank, size):
    """In `free` it leaves all fragments before it waits for any."""
    x = [variable(name=name) for name in "ab"]
    with sgd(comm, 2, quorum=size, fragments=2) as opt:
        for _ in range(2 if rank == size - 1 else 6):
            opt.minimize(gives(1.0, 1.0), var_list=x)
    assert opt.global_step == 6


class Own(hpc.Optimizer):
    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        pass


@pytest.mark.any_size
def test_an_optimizer_of_the_user_cannot_update_fragments(comm, rank):
    variables = [variable(rank, name=name) for name in "ab"]
    with sgd(comm, 4, outer=Own("own"), fragments=2) as opt:
        error = raised(opt.initialize, variables)
    check_error(error, "fragments= needs an outer optimizer that is a rule")
    assert [float(each.value) for each in variables] == [rank, rank]


@pytest.mark.ranks(min=2)
@pytest.mark.any_size
def test_dedicated_servers_have_no_fragments(comm):
    error = raised(sgd, comm, 4, fragments=2, dedicated=True)
    check_error(error, "with dedicated=True, use fragments=1")


@pytest.mark.any_size
def test_each_fragment_needs_a_variable(make, comm):
    error = raised(make(comm, 4, fragments=2).initialize, [variable()])
    check_error(error, "fragments must be at most the number of variables, which is 1")
