"""The record of a run: the file from which ``hpcaccum replay`` repeats its updates.

It has JSON lines. The first has the options and circumstances of the run, and the last
the digests of its final variables and slots. Between them is one line for each update,
with the gradients that made it.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import math
import os
from dataclasses import dataclass
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hpcaccum import InvalidArgumentError
from hpcaccum.input_files import json_value, read_lines
from hpcaccum.processor import processor_name
from hpcaccum.train.options import STRATEGIES
from hpcaccum.train.strategies import RULES

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from hpcaccum import Group
    from hpcaccum.dtypes import Array
    from hpcaccum.train.data import Dataset

FORMAT = 1
# Those with an order of admission.
_RECORDED = tuple(name for name in STRATEGIES if name != "cross-shard")
_DIGEST_BYTES = 16


class Gradient(NamedTuple):
    """A gradient that was accepted.

    Attributes:
        rank: The rank that computed it.
        number: Its place among the gradients of the rank, from 0; dropped ones count.
        step: The number of updates in the parameters that it was computed with.
        loss: The loss of its last batch; None if that is not finite.
    """

    rank: int
    number: int
    step: int
    loss: float | None


@dataclass(frozen=True)
class Recording:
    """A run as its record describes it.

    Attributes:
        nodes: The ranks of each node.
        widths: Of all layers of the model.
        data: The file of the data; None for the digits.
        data_digest: See `data_digest`.
        arithmetic: See `arithmetic`.
        updates: The number and the gradients of each update.
        digests: See `digests`.

    The other attributes are options of ``hpcaccum train``.
    """

    strategy: str
    optimizer: str
    rate: float
    batch: int
    period: int
    seed: int
    nodes: Sequence[Sequence[int]]
    widths: Sequence[int]
    data: Path | None
    data_digest: str
    arithmetic: Mapping[str, Sequence[str]]
    updates: Sequence[tuple[int, Sequence[Gradient]]]
    digests: Mapping[str, str]

    @property
    def ranks(self) -> int:
        """The number of ranks of the run."""
        return sum(map(len, self.nodes))


def finite(loss: float) -> float | None:
    """Return a loss as it is recorded: JSON has no NaN."""
    return loss if math.isfinite(loss) else None


def _digest(*arrays: Array) -> str:
    state = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for array in arrays:
        state.update(f"{array.dtype.str} {array.shape} ".encode())
        state.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return state.hexdigest()


def data_digest(data: Dataset) -> str:
    """Return a digest of all samples."""
    return _digest(data.x, data.y, data.x_test, data.y_test)


def digests(snapshot: Mapping[str, Any]) -> dict[str, str]:
    """Return digests of the variables and of each part of their state, by name."""
    found = {name: _digest(value) for name, value in snapshot["variables"].items()}
    for name, parts in snapshot["state"].items():
        for part, value in parts.items():
            found[f"{name}/{part}"] = _digest(np.asarray(value))
    return found


def combined(found: Mapping[str, str]) -> str:
    """Return one digest of several."""
    text = "".join(f"{name} {each}\n" for name, each in found.items())
    return hashlib.blake2b(text.encode(), digest_size=_DIGEST_BYTES).hexdigest()


def arithmetic(group: Group) -> dict[str, list[str]]:
    """Return what else the bits of matrix products depend on. Collective.

    Returns:
        Names, and the different values that the ranks have.
    """
    mine = {
        "NumPy": np.__version__,
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "not set"),
        "processor": processor_name(),
    }
    found = group.allgather(mine, "arithmetic")
    return {name: sorted({each[name] for each in found}) for name in mine}


def read(path: Path) -> Recording:
    """Return the run that a file describes.

    Raises:
        InvalidArgumentError: If it cannot be read, or is not a complete record.
    """
    first, *rest = [_parsed(line) for line in read_lines(path)] or [{}]
    _check_kind(path, first, rest[-1] if rest else {})
    with _naming(path, 1):
        facts = _facts(first)
    ranks = range(sum(map(len, facts["nodes"])))
    updates = []
    for number, line in enumerate(rest[:-1], 2):
        with _naming(path, number):
            updates.append(_update(line, ranks))
    with _naming(path, 1 + len(rest)):
        found = {str(name): str(each) for name, each in rest[-1]["digests"].items()}
    return Recording(**facts, updates=updates, digests=found)


def _check_kind(path: Path, first: dict[str, Any], last: dict[str, Any]) -> None:
    if first.get("event") != "record":
        raise InvalidArgumentError(f"{path} is not a record of hpcaccum train")
    if first.get("format") != FORMAT:
        raise InvalidArgumentError(
            f"{path} has format {first.get('format')}, this version of hpcaccum reads "
            f"format {FORMAT}"
        )
    if last.get("event") != "end":
        raise InvalidArgumentError(
            f"{path} is not complete: its last line is missing, because the run did "
            f"not end in order or the file was cut off"
        )


@contextlib.contextmanager
def _naming(path: Path, number: int) -> Iterator[None]:
    """Name the line in the error if what is read in the block is missing or wrong."""
    try:
        yield
    except (
        LookupError,
        TypeError,
        ValueError,
        AttributeError,
        OverflowError,
    ) as error:
        raise InvalidArgumentError(
            f"{path}: line {number} is damaged: {error!r}"
        ) from None


def _parsed(line: str) -> dict[str, Any]:
    """Return the object of a line; an empty one for anything else."""
    try:
        found = json_value(line)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _facts(first: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes of a recording that the first line has."""
    options = first["options"]
    [strategy], optimizer = options["strategies"], options["optimizer"]
    if strategy not in _RECORDED or optimizer not in RULES:
        raise ValueError(f"unknown option {strategy} or {optimizer}")
    nodes = [[index(rank) for rank in ranks] for ranks in first["nodes"]]
    ranks = sorted(itertools.chain.from_iterable(nodes))
    if len(ranks) != index(first["ranks"]) or ranks != list(range(len(ranks))):
        raise ValueError(f"nodes {nodes}")
    return {
        "strategy": strategy,
        "optimizer": optimizer,
        "rate": _rate(options["rate"]),
        **{name: _count(options[name], 1) for name in ("batch", "period")},
        "seed": _count(options["seed"], most=math.inf),
        "nodes": nodes,
        "widths": [_count(width, 1) for width in first["widths"]],
        "data": None if options["data"] is None else Path(options["data"]),
        "data_digest": str(first["data_digest"]),
        "arithmetic": {
            str(name): list(map(str, values))
            for name, values in first["arithmetic"].items()
        },
    }


def _rate(number: Any) -> float:
    if not 0 < float(number) < math.inf:
        raise ValueError(f"rate {number}")
    return float(number)


def _count(number: Any, least: int = 0, most: float = 2**31 - 1) -> int:
    if index(number) < least:
        raise ValueError(f"{number} is less than {least}")
    if index(number) > most:
        raise ValueError(f"{number} is more than {most}")
    return index(number)


def _update(line: Mapping[str, Any], ranks: range) -> tuple[int, list[Gradient]]:
    gradients = [
        Gradient(
            _count(rank),
            _count(number),
            _count(step),
            None if loss is None else float(loss),
        )
        for rank, number, step, loss in line["gradients"]
    ]
    if not gradients or any(each.rank not in ranks for each in gradients):
        raise ValueError(f"gradients {line['gradients']}")
    return index(line["update"]), gradients
