"""The checkpoints of a run: when they are written, and how a run continues."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from hpcaccum import CheckpointError, InvalidArgumentError, checkpoint
from hpcaccum.arguments import step_number
from hpcaccum.files import check_directory, ending_the_job
from hpcaccum.stopping import ask_restart
from hpcaccum.train.data import Dataset
from hpcaccum.train.options import Options

_PARTS = {"facts", "step", "optimizer", "data"}

logger = logging.getLogger("hpcaccum")


class Saver:
    """Reads and writes the checkpoints, on the host if there is ``--save``.

    `found` is the one to continue from. How samples become inputs of the model is saved
    with it.
    """

    def __init__(self, options: Options, rank: int, data: Dataset) -> None:
        """Raise InvalidArgumentError if the directory cannot be used as it is."""
        self._directory = options.save if rank == options.host else None
        self._every = options.every
        widths = data.x.shape[1], *options.hidden, data.classes
        # What must be the same in a run that continues.
        facts = {
            "--strategy": options.strategies[0],
            "--optimizer": options.optimizer,
            "network": "-".join(map(str, widths)),
        }
        self._about = {"facts": facts, "data": data.scaling}
        self.found: Any = None
        if self._directory:
            check_directory("--save", self._directory)
            if options.resume:
                self.found = _load(self._directory, facts)
            elif checkpoint.files(self._directory):
                raise InvalidArgumentError(
                    f"--save: {self._directory} has checkpoints: add --resume to "
                    f"continue from the last one, or use another directory"
                )

    def start(self, snapshot: Callable[[], dict[str, Any]]) -> None:
        """Save snapshots of an optimizer. From now on, no earlier job can."""
        self._snapshot = snapshot
        if self._directory:
            with self._ending_the_job():
                checkpoint.take(self._directory)
        self.begin(0)

    @contextlib.contextmanager
    def _ending_the_job(self) -> Iterator[None]:
        """Turn an error of saving into an exit with one line."""
        try:
            with ending_the_job("--save", self._directory):
                yield
        except CheckpointError as error:
            ask_restart(None)
            raise SystemExit(f"--save {error}") from None

    def begin(self, step: int) -> None:
        """Count from a step and from now on."""
        self._last, self._at = step, time.monotonic()

    def passed(self, step: int) -> None:
        """Write one if it is time; the model has made ``step`` updates."""
        if self._every.updates:
            due = step - self._last >= self._every.updates
        else:
            due = time.monotonic() - self._at >= self._every.seconds
        if due and self._directory:
            with self._ending_the_job():
                try:
                    self._save(step)
                except OSError as error:
                    # The training is worth more. The next may succeed, the last must.
                    logger.warning("--save: %s; training goes on", error)
            self.begin(step)

    def finish(self, step: int) -> None:
        """Write the last one, after the last update; end the job if that fails."""
        if self._directory:
            with self._ending_the_job():
                self._save(step)

    def _save(self, step: int) -> None:
        assert self._directory is not None
        snapshot = self._snapshot()
        if not all(np.isfinite(each).all() for each in snapshot["variables"].values()):
            logger.warning(
                "--save: the model has NaN or infinite values and is not saved"
            )
            return
        # With a server, other ranks may have made updates since.
        step = snapshot.get("global_step", step)
        state = {**self._about, "step": step, "optimizer": snapshot}
        checkpoint.save(self._directory, state)
        # Also if the next error ends this run.
        ask_restart("restart\n")


def _load(directory: Path, expected: dict[str, str]) -> Any:
    """Return the last checkpoint, if there is one; raise if it is of another run."""
    try:
        found = checkpoint.load(directory)
    except (CheckpointError, OSError) as error:
        raise InvalidArgumentError(f"--resume: {error}") from None
    if found is None:
        return None
    if (
        not isinstance(found, dict)
        or found.keys() != _PARTS
        or not isinstance(found["facts"], dict)
        or step_number(found["step"], f"--resume: {directory}: step") < 0
    ):
        raise InvalidArgumentError(
            f"--resume: {directory} has checkpoints of another program"
        )
    for name, value in expected.items():
        saved = found["facts"].get(name)
        if saved != value:
            raise InvalidArgumentError(
                f"--resume: {directory} has checkpoints of a run with {name} {saved}, "
                f"this one has {name} {value}"
            )
    return found
