"""Shows how long ranks wait for local steps that are pushed whole, or in fragments.

    mpiexec -n 4 python examples/overlap.py --fragments 4 --overlap 10

Each step is a sleep, in place of the computation of a gradient.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
from mpi4py import MPI

import hpcaccum as hpc

PARSER = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
PARSER.add_argument("--megabytes", type=float, default=4, help="of parameters (4)")
PARSER.add_argument("--seconds", type=float, default=0.1, help="of a step (0.1)")
PARSER.add_argument("--period", type=int, default=50, help="steps of a period (50)")
PARSER.add_argument("--periods", type=int, default=3, help="that are measured (3)")
PARSER.add_argument("--fragments", type=int, default=1, help="(1)")
PARSER.add_argument("--overlap", type=int, default=0, help="steps (0)")
PARSER.add_argument("--wire-dtype", help='such as "bfloat16"')
# As many layers as a small model has.
LAYERS = 16


def main() -> None:
    options = PARSER.parse_args()
    world = MPI.COMM_WORLD
    count = int(options.megabytes * 1e6 / 4 / LAYERS)
    layers = [
        hpc.Variable(np.zeros(count, np.float32), f"layer{n}") for n in range(LAYERS)
    ]
    grads = [np.ones(count, np.float32)] * LAYERS

    computed = 0.0

    def loss():
        nonlocal computed
        begun = time.perf_counter()
        time.sleep(options.seconds)
        computed += time.perf_counter() - begun
        return 0.0, grads

    opt = hpc.LocalStepsOptimizer(
        hpc.SGD(1e-3),
        hpc.Momentum(0.7, 0.9, use_nesterov=True),
        options.period,
        quorum=world.size,
        fragments=options.fragments,
        overlap=options.overlap,
        wire_dtype=options.wire_dtype,
    )
    opt.initialize(layers)
    # The first period has no pushes before.
    for _ in range(options.period):
        opt.minimize(loss)
    world.Barrier()
    begun, waited, computed = time.perf_counter(), opt.waited, 0.0
    for _ in range(options.periods * options.period):
        opt.minimize(loss)
    seconds, waited = time.perf_counter() - begun, opt.waited - waited
    shares = world.gather((waited / seconds, 1 - computed / seconds, seconds))
    opt.free()
    if world.rank == 0:
        for rank, (waits, outside, seconds) in enumerate(shares):
            print(
                f"rank {rank}: of {seconds:.1f} s, {waits:.1%} in waits, {outside:.1%} "
                f"outside the computation of gradients"
            )


if __name__ == "__main__":
    main()
