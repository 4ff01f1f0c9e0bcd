"""Reports of `log_to` on optimizers that train."""

from __future__ import annotations

import contextlib

import pytest

import hpcaccum as hpc

from .training import ONE_SIDED, gives, variable

pytestmark = pytest.mark.any_size


@pytest.mark.parametrize("kind", ["CrossShard", *ONE_SIDED])
def test_reports_add_up_to_the_statistics(comm, rank, size, kind):
    variables, reports, inner = [variable()], [], hpc.SGD(0.1)
    if kind == "CrossShard":
        opt = hpc.CrossShardOptimizer(inner, comm=comm)
    else:
        opt = ONE_SIDED[kind](inner, variables, comm)
    log = hpc.log_to(reports.append, every=1e-9) if rank == 0 else None
    with log or contextlib.nullcontext():
        with opt:
            opt.initialize(variables)
            for _ in range(6):
                opt.minimize(gives(1.0), var_list=variables)
        counts, steps = opt.statistics(), opt.global_step

    if rank == 0:
        # The first push begins; the others, and the end, report.
        assert len(reports) == (3 if kind == "AGN" else 6)
        assert {each["optimizer"] for each in reports} == {opt.get_name()}
        last = reports[-1]
        assert (last["step"], tuple(last["accepted"])) == (steps, counts.accepted)
        assert tuple(last["dropped"]) == counts.dropped
        assert all(0 <= each["waiting"] <= 1 for each in reports)
        assert all(each["updates_per_second"] >= 0 for each in reports)
