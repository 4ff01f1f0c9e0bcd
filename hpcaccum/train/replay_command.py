"""The command ``hpcaccum replay``: its options, its checks and its output."""

from __future__ import annotations

import argparse
import functools
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from hpcaccum import Group, InvalidArgumentError
from hpcaccum.errors import counted
from hpcaccum.train.data import load
from hpcaccum.train.recording import arithmetic, combined, data_digest, read
from hpcaccum.train.replay import DifferenceError, Replay
from hpcaccum.train.report import balanced_text

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpcaccum.train.data import Dataset
    from hpcaccum.train.recording import Recording
    from hpcaccum.train.replay import Replica

logger = logging.getLogger("hpcaccum")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add all options to the parser."""
    parser.add_argument(
        "file", type=Path, metavar="FILE.jsonl", help="written by train --record"
    )
    parser.add_argument(
        "--until",
        type=int,
        metavar="UPDATE",
        help="stop after this update, and print what the model is then",
    )
    parser.add_argument(
        "--data",
        type=Path,
        metavar="FILE.npz",
        help="the data of the run, if it is not where it was",
    )


def prepare(args: argparse.Namespace) -> Callable[[], None]:
    """Read the record and the data; return the replay. Collective.

    Raises:
        InvalidArgumentError: On every rank.
    """
    group = Group.of()
    if group.size > 1:
        raise InvalidArgumentError(
            f"a replay runs in one process, without mpiexec; there are {group.size} "
            f"ranks"
        )
    recording = read(args.file)
    updates = _until(args.until, len(recording.updates))
    data = load(args.data or recording.data, group)
    if data_digest(data) != recording.data_digest:
        raise InvalidArgumentError(
            f"{data.name} differs from the data of the recorded run"
        )
    ends = data.x.shape[1], data.classes
    if (*recording.widths[:1], *recording.widths[1:][-1:]) != ends:
        raise InvalidArgumentError(
            f"{args.file}: line 1 is damaged: layers of widths {recording.widths} do "
            f"not begin with {ends[0]} and end with {ends[1]}"
        )
    _compare_arithmetic(recording, group)
    return functools.partial(_replay, recording, data, updates)


def _until(update: int | None, updates: int) -> int:
    if update is not None and not 0 <= update <= updates:
        raise InvalidArgumentError(
            f"--until must be from 0 to {updates}, the updates of the run, got {update}"
        )
    return updates if update is None else update


def _compare_arithmetic(recording: Recording, group: Group) -> None:
    for name, values in arithmetic(group).items():
        before = recording.arithmetic.get(name, [])
        if values != before:
            logger.warning(
                "%s is %s, in the recorded run %s: matrix products may have other bits",
                name,
                ", ".join(values),
                ", ".join(before),
            )


def _replay(recording: Recording, data: Dataset, updates: int) -> None:
    replay, total = Replay(recording, data), len(recording.updates)
    try:
        replay.run(updates)
        if updates == total:
            replay.compare()
    except DifferenceError as error:
        raise SystemExit(f"the replay differs: {error}") from None
    same = "variables and slots are" if updates == total else "all losses so far are"
    ranks = counted(recording.ranks, "rank")
    print(
        f"{recording.strategy} on {ranks}: repeated {updates} of {total} updates; "
        f"{same} the same, bit for bit\n{_describe(replay.center, data)}"
    )


def _describe(center: Replica, data: Dataset) -> str:
    loss, accuracy, balanced = center.model.evaluate(data.x_test, data.y_test)
    return (
        f"test loss {loss:.6f}, test accuracy {accuracy:.1%}"
        f"{balanced_text(balanced)}, digest "
        f"{combined(center.digests())}"
    )
