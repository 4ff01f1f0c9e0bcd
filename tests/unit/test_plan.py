"""``hpcaccum plan``: what it reads, and what it predicts."""

from __future__ import annotations

import argparse
import dataclasses
import heapq
import itertools
import json

import numpy as np
import pytest

from hpcaccum import cli
from hpcaccum.accumulator import admits
from hpcaccum.accumulator.state import State
from hpcaccum.bench.plan import Measured, fit, simulated
from hpcaccum.plan.compute import Draws, compute
from hpcaccum.plan.prediction import predict
from hpcaccum.plan.setting import Machine, Setting, machine
from hpcaccum.plan.simulation import simulate

FREE = Machine(call=0, turn=0, update=0, reduce=0, copy=1e30, latency=0, link=1e30)
ONE_NODE = {"nodes": 1, "nbytes": 4096}


def predicted(strategy, ranks, text, costs=FREE, **options):
    setting = Setting(strategy, ranks, **{**ONE_NODE, **options})
    return predict(setting, costs, compute(text), updates=2000, seeds=range(1, 2))


def drawn(text, ranks=4, nodes=1, count=20000):
    node_of = Setting("agn", ranks, nodes, 4).node_of
    draws = Draws(compute(text), node_of, 0)
    return draws.draw(np.arange(ranks), count)


# The text of --compute


@pytest.mark.parametrize(
    ("text", "mean"),
    [
        ("30ms", 0.03),
        ("1.5s", 1.5),
        ("200 us", 200e-6),
        ("normal 30ms 3ms", 0.03),
        ("lognormal 30ms 0.5", 0.03),
        ("exponential 30ms", 0.03),
        ("30ms; 50% x3", 0.06),
        ("30ms; 50% x2-4", 0.06),
    ],
)
def test_the_mean_is_the_one_of_the_text(text, mean):
    assert drawn(text).mean() == pytest.approx(mean, rel=0.01)


def test_changes_concern_the_ranks_and_nodes_that_they_name():
    means = drawn("10ms; rank 0 +5ms; node 1 x2; ranks 1-2 x3", nodes=2).mean(axis=1)

    assert means == pytest.approx([0.015, 0.03, 0.06, 0.02])


@pytest.mark.parametrize(
    "text", ["0.01 0.02\n0.03", "10ms\n20ms # slow\n30ms", "[0.01,0.02,0.03]"]
)
def test_times_of_a_file_are_read_in_order(tmp_path, text):
    path = tmp_path / "times"
    path.write_text(text)

    times = drawn(str(path), count=6)[0].tolist()

    assert times[:3] == times[3:]
    assert sorted(times[:3]) == pytest.approx([0.01, 0.02, 0.03])


def test_a_trace_has_the_times_of_each_rank(tmp_path):
    path = tmp_path / "trace.json"
    events = [
        {
            "name": name,
            "ph": "X",
            "pid": 1,
            "tid": rank,
            "ts": 0,
            "dur": 1000 * (rank + 1),
        }
        for rank in range(2)
        for name in ("compute", "wait")
    ]
    path.write_text(json.dumps({"traceEvents": events}))

    assert drawn(str(path), count=1)[:, 0] == pytest.approx([1e-3, 2e-3, 1e-3, 2e-3])


FIRST = "the first term must be a time such as 30ms"
WRONG = {
    "": FIRST,
    "30": FIRST,
    "gamma 30ms": FIRST,
    "normal 30ms": "normal needs MEAN DEVIATION, got 'normal 30ms'",
    "normal 30ms 0.1": "DEVIATION of normal must be a time such as 30ms",
    "lognormal 30 0.1": "MEAN of lognormal must be a time such as 30ms",
    "lognormal 30ms 3ms": "SIGMA of lognormal, the deviation of the logarithm, must",
    "30ms; 6%": "term 2, '6%', must be '6% x3' or '6% x2-10'",
    "30ms; 160% x3": "term 2, '160% x3', must be '6% x3'",
    "30ms; 6% x3; rank 7": "term 3, 'rank 7', must be '6% x3'",
    "30ms; rank 2- x2": "term 2, 'rank 2- x2', must name numbers such as 7",
    "30ms; rank 7 +45": "term 2, 'rank 7 +45', its delay must be a time",
    "30ms; node 1 xb": "term 2, 'node 1 xb', its factor must be a number",
    "30ms; failures 0.01 restart 5m": "or 'failures 0.01/h restart 5m'",
}


@pytest.mark.parametrize("text", WRONG)
def test_an_error_names_the_term_and_what_was_expected(text):
    with pytest.raises(argparse.ArgumentTypeError) as error:
        compute(text)

    assert WRONG[text] in str(error.value)


def test_the_network_has_a_latency_and_a_rate_for_each_level():
    found = machine("1us 25GB/s; 2us 12GB/s")

    assert (found.copy, found.latency, found.link) == (25e9, 2e-6, 12e9)
    with pytest.raises(argparse.ArgumentTypeError, match="such as '1us 25GB/s; 2us"):
        machine("25GB/s")


# What is predicted


@pytest.mark.parametrize("strategy", ["drop-stale", "agn", "local-steps"])
def test_equal_ranks_are_one_update_late_for_each_other_rank(strategy):
    found = predicted(strategy, 8, "normal 30ms 3ms")

    assert found.means["mean_lag"] == pytest.approx(7, rel=0.01)
    assert found.means["updates_per_second"] == pytest.approx(8 / 0.03, rel=0.02)
    assert not found.doubts


@pytest.mark.parametrize("staleness", [0, 2, 5])
def test_the_mean_lag_is_that_of_little_s_law_if_gradients_are_dropped(staleness):
    found = predicted("drop-stale", 12, "exponential 30ms", staleness=staleness)

    assert found.means["dropped"] > 0.1
    assert not found.doubts


def test_a_rank_pulls_updates_that_others_make_until_it_has_noticed_its_own():
    costs = dataclasses.replace(FREE, call=140e-6, update=60e-6)

    together = predicted("agn", 4, "30ms", costs, period=5)
    apart = predicted("agn", 4, "lognormal 30ms 0.3", costs, period=5)

    # 2.5 was measured with ranks that begin together, 2.9 with the others.
    assert together.means["mean_lag"] == pytest.approx(2.5, abs=0.3)
    assert apart.means["mean_lag"] == pytest.approx(3, rel=0.02)
    assert "ranks push together" in together.doubts[0]
    assert not apart.doubts


# Milliseconds of an update, of a simulation that others have made.
OTHERS = {8: 65.8, 7: 39.1, 6: 30.3, 5: 25.2}


@pytest.mark.parametrize("quorum", OTHERS)
def test_backup_workers_as_another_simulation_has_them(quorum):
    text, place = "20ms; 6% x2-10", {"quorum": quorum, "staleness": 0}

    found = predicted("sync-replicas", 8, text, **place)

    assert 1e3 / found.means["updates_per_second"] == pytest.approx(
        OTHERS[quorum], rel=0.1
    )


def naive(ranks, quorum, text, updates, staleness):
    """Return updates a second and the share that is dropped, one event at a time."""
    times = [iter(row) for row in drawn(text, ranks, count=4 * updates).tolist()]
    state, waiting = State(0, 0, 0, 1, quorum), []
    local, counts = [0] * ranks, [0, 0]
    heap = [(next(each), rank) for rank, each in enumerate(times)]
    heapq.heapify(heap)
    while state.step < updates:
        now, rank = heapq.heappop(heap)
        accepted = admits(state.step, local[rank], staleness)
        counts[accepted] += 1
        goes_on = [rank]
        if accepted:
            waiting.append(rank)
            before, state = state, state.admitted(0)
            goes_on = waiting if state.step > before.step else []
        if goes_on is waiting:
            state, waiting = state._replace(waiting=1, number=quorum), []
        for each in goes_on:
            local[each] = state.step
            heapq.heappush(heap, (now + next(times[each]), each))
    return updates / now, counts[0] / sum(counts)


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("quorum", [3, 6, 8])
def test_rounds_are_those_of_the_accumulator(quorum, staleness):
    text = "lognormal 30ms 0.5; rank 7 x2"

    place = {"quorum": quorum, "staleness": staleness}

    found = predicted("sync-replicas", 8, text, **place)

    speed, share = naive(8, quorum, text, 3000, staleness)
    assert found.means["updates_per_second"] == pytest.approx(speed, rel=0.03)
    assert found.means["dropped"] == pytest.approx(share, abs=0.01)
    assert not found.doubts


def test_all_wait_for_the_slowest_rank():
    found = predicted("cross-shard", 8, "30ms; rank 3 x2")

    assert 1 / found.means["updates_per_second"] == pytest.approx(0.06, rel=0.02)
    assert np.argmin(found.waiting) == 3


def test_a_slow_rank_is_dropped_if_it_is_too_late():
    found = predicted("drop-stale", 4, "10ms; rank 3 x20", staleness=10)

    lags = found.lags
    assert found.means["dropped"] == pytest.approx(1 / 61, rel=0.1)
    assert sum(lags[20:]) / sum(lags) == pytest.approx(1 / 61, rel=0.1)


def test_the_link_of_one_server_is_the_bottleneck():
    place = {"nodes": 4, "nbytes": 10**8}
    costs = machine("1us 1000GB/s; 2us 10GB/s")

    one = predicted("drop-stale", 16, "30ms", costs, **place)
    four = predicted("drop-stale", 16, "30ms", costs, **place, servers=4)

    assert one.means["busiest_link"] > 0.95
    # A gradient crosses 3/4 of two links in each direction; before, all of one.
    speeds = [each.means["updates_per_second"] for each in (one, four)]
    assert 1.5 < speeds[1] / speeds[0] < 2


def test_restarts_take_their_share_of_the_time():
    found = compute("30ms; failures 0.5/h restart 30m")

    assert found.availability(4) == pytest.approx(0.5)


@pytest.mark.parametrize("strategy", ["cross-shard", "sync-replicas", "drop-stale"])
def test_a_seed_gives_the_same_again(strategy):
    quorum = 3 if strategy == "sync-replicas" else None
    setting = Setting(strategy, 4, **ONE_NODE, quorum=quorum, staleness=8)

    def speed(seed):
        text = compute("exponential 30ms")
        return simulate(setting, Machine(), text, 200, seed).seconds

    assert speed(1) == speed(1) != speed(2)


@pytest.mark.parametrize(("strategy", "moves"), [("agn", 5), ("local-steps", 3)])
def test_a_local_step_takes_the_longer_the_larger_the_model_is(strategy, moves):
    costs = dataclasses.replace(FREE, copy=10e9)

    found = predicted(strategy, 2, "30ms", costs, nbytes=10**7, period=5)

    # Then a push and a pull, and an update of three moves.
    seconds = 5 * (0.03 + moves * 1e-3) + 5e-3
    assert 2 / found.means["updates_per_second"] == pytest.approx(seconds, rel=0.03)


# The costs


def test_costs_are_found_that_take_the_measured_times():
    known = Machine(call=300e-6, turn=30e-6, update=40e-6, reduce=50e-6, copy=5e9)
    measured = []
    for ranks, nbytes in itertools.product((2, 4), (4096, 1 << 22)):
        place = {"ranks": ranks, "nodes": 1, "nbytes": nbytes}
        for setting in (
            Setting("cross-shard", **place),
            Setting("sync-replicas", **place, quorum=ranks, staleness=0),
            Setting("drop-stale", **place),
        ):
            measured.append(Measured(setting, simulated(setting, known), known.update))

    found = fit(measured, network=False, ranks=4)

    assert found.update == known.update
    assert found.call == pytest.approx(known.call, rel=0.1)
    assert found.copy == pytest.approx(known.copy, rel=0.1)


# The command


def test_the_command_writes_a_line_for_each_setting(tmp_path, capsys):
    path = tmp_path / "plan.json"
    words = "plan --ranks 4,8 --updates 100 --repeats 2 --quorum 3 --json"

    assert cli.main([*words.split(), str(path), "--compute", "30ms; 6% x3"]) == 0

    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["strategy"] for row in rows[:2]] == ["cross-shard", "sync-replicas"]
    assert len(rows) == 10
    wanted = {
        *("strategy", "ranks", "quorum", "staleness", "period", "servers"),
        *("updates_per_second", "samples_per_second", "dropped", "mean_lag"),
        *("lag_p90", "waiting", "busiest_link", "server_utilisation", "memory_bytes"),
        "intervals",
    }
    assert all(wanted <= set(row) for row in rows)
    low, high = rows[1]["intervals"]["dropped"]
    assert low <= rows[1]["dropped"] <= high
    assert "\n8 ranks, every update waits: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--compute", "30"], "argument --compute: the first term must be a time"),
        (["--compute", "30ms", "--ranks", "8:4"], "argument --ranks: must be"),
        (
            ["--compute", "30ms; rank 8 x2"],
            "--compute: rank 8 does not exist; the last",
        ),
        (["--compute", "30ms", "--quorum", "5"], "--quorum: 5 is more than 4 ranks"),
        (["--compute", "30ms", "--servers", "2"], "--servers: 2 servers need as many"),
    ],
)
def test_bad_options_are_one_line(words, message, capsys):
    with pytest.raises(SystemExit) as left:
        cli.main(["plan", "--ranks", "4", *words])

    assert left.value.code == 2
    assert message in capsys.readouterr().err
