"""``hpcaccum plan``: from the command line to the table."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from hpcaccum.files import JsonLines, check_apart, ending_the_job
from hpcaccum.plan import advice
from hpcaccum.plan.machine import Machine
from hpcaccum.plan.options import settings
from hpcaccum.plan.simulation import predict
from hpcaccum.plots import check_picture

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from hpcaccum.plan.setting import Setting

_USUAL = "usual costs of an exchange (--network has those of bench plan)"


def prepare(args: argparse.Namespace) -> Callable[[], None]:
    """Check all options; return the command, ready to call."""
    found = settings(args)
    check_apart({"--json": args.json, "--plot": args.plot}, {})
    if args.plot:
        check_picture(args.plot)
    return functools.partial(_run, args, found, JsonLines("--json", args.json))


def _run(args: argparse.Namespace, found: list[Setting], output: JsonLines) -> None:
    machine = args.network or Machine()
    title = (
        f"{args.parameters} parameters in {args.dtype}, a gradient takes "
        f"{args.compute.text}\n{_USUAL if args.network is None else args.network}"
    )
    print(title, advice.LEGEND, "", sep="\n", flush=True)
    predictions = []
    for setting in found:
        prediction = predict(
            setting,
            machine,
            args.compute,
            updates=args.updates,
            seeds=range(args.seed, args.seed + args.repeats),
            batch=args.batch,
        )
        facts = prediction.facts()
        facts.update(compute=args.compute.text, seed=args.seed)
        output.write({**facts, "machine": vars(machine), "fitted": machine.ranks > 0})
        predictions.append(prediction)
    output.close()
    print(*advice.lines(predictions), "", sep="\n")
    print(*advice.words(predictions, args.compute), sep="\n")
    print("how fast the loss falls with a lag, or with more samples, is not predicted")
    if args.plot:
        from hpcaccum.plan.plot import draw

        with ending_the_job("--plot", args.plot):
            draw(predictions, title, args.plot)
        print(f"picture: {args.plot}")
