"""The notes of a rank about its gradients, and the record that is written of them."""

from __future__ import annotations

import itertools
import json
import math
from array import array
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcaccum.output_files import ending_the_job, open_output
from hpcaccum.train.recording import (
    FORMAT,
    Gradient,
    arithmetic,
    data_digest,
    digests,
    finite,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from hpcaccum import Group, Receipt
    from hpcaccum.dtypes import Array
    from hpcaccum.train.data import Dataset

# An accepted gradient: the update that it made, and the fields of `Gradient`.
_ROW = np.dtype(
    [
        ("update", np.int64),
        ("rank", np.int64),
        ("number", np.int64),
        ("step", np.int64),
        ("loss", np.float64),
    ]
)


class RunRecorder:
    """Notes the gradients of this rank; one rank writes those of all to a file.

    The receipts determine the order of admission: a gradient that was accepted at a
    step is part of the update that makes the next one.

    Args:
        path: File to overwrite; None on the ranks that do not write it.

    Attributes:
        loss: That of the last batch; set it before `add`.

    Raises:
        InvalidArgumentError: If the file cannot be written.
    """

    def __init__(self, path: Path | None) -> None:
        self._path, self._file = path, open_output("--record", path)
        self.loss = math.nan
        # Of each gradient: the step of its parameters, and its update or 0.
        self._steps = array("q")
        self._losses = array("d")

    def begin(
        self,
        facts: Mapping[str, Any],
        widths: Sequence[int],
        data: Dataset,
        group: Group,
    ) -> None:
        """Write the first line. Collective.

        Args:
            facts: From `log.circumstances`.
            widths: Of the model.
            data: That of the run.
            group: The ranks.
        """
        found = arithmetic(group)
        if self._file:
            self._write(
                event="record",
                format=FORMAT,
                nodes=group.nodes,
                widths=widths,
                data_digest=data_digest(data),
                arithmetic=found,
                **facts,
            )

    def add(self, receipt: Receipt) -> None:
        """Note the outcome for a gradient."""
        update = receipt.global_step + 1 if receipt else 0
        self._steps.extend((receipt.local_step, update))
        self._losses.append(self.loss)

    def finish(self, group: Group, snapshot: Mapping[str, Any] | None) -> None:
        """Write the updates and the last line, and close the file. Collective.

        Args:
            group: The ranks.
            snapshot: That of the optimizer after the last update; on one rank.
        """
        mine = None if snapshot is None else digests(snapshot)
        rows, found = zip(
            *group.allgather((self._accepted(group.rank), mine), "--record"),
            strict=True,
        )
        if self._file:
            for update, gradients in _by_update(np.concatenate(rows)):
                self._write(update=update, gradients=gradients)
            self._write(event="end", digests=next(filter(None, found)))
            self._file.close()

    def _accepted(self, rank: int) -> Array:
        """Return a row for each accepted gradient of this rank."""
        steps = np.array(self._steps, np.int64).reshape(-1, 2)
        rows = np.empty(len(steps), _ROW)
        rows["update"], rows["step"] = steps[:, 1], steps[:, 0]
        rows["rank"], rows["number"] = rank, np.arange(len(steps))
        rows["loss"] = self._losses
        return rows[rows["update"] > 0]

    def _write(self, **facts: Any) -> None:
        assert self._file
        with ending_the_job("--record", self._path):
            self._file.write(json.dumps(facts, default=str) + "\n")
            self._file.flush()


def _by_update(rows: Array) -> Iterator[tuple[int, list[Gradient]]]:
    """Yield each update with its gradients, in rank order."""
    rows.sort(order=["update", "rank"])
    for update, group in itertools.groupby(rows.tolist(), lambda row: row[0]):
        yield (
            update,
            [
                Gradient(rank, number, step, finite(loss))
                for _, rank, number, step, loss in group
            ],
        )
