"""The checkpoints of a run: when they are written, and how a run continues."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcaccum import CheckpointError, InvalidArgumentError, checkpoint
from hpcaccum.arguments import step_number
from hpcaccum.files import check_directory, ending_the_job
from hpcaccum.save_owner import take

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hpcaccum.train.data import Dataset
    from hpcaccum.train.options import Options

_PARTS = {"facts", "step", "optimizer", "data"}

logger = logging.getLogger("hpcaccum")


def directory_of(options: Options, rank: int) -> Path | None:
    """Return where a rank saves the model that it keeps; None if it keeps none."""
    keepers = options.keepers(options.strategies[0])
    if options.save is None or rank not in keepers:
        return None
    if len(keepers) == 1:
        return options.save
    return options.save / f"group-{keepers.index(rank)}"


@contextlib.contextmanager
def _ending_the_job(path: Path) -> Iterator[None]:
    """Turn an error of saving into an exit with one line."""
    try:
        with ending_the_job("--save", path):
            yield
    except CheckpointError as error:
        queue_again(False)
        raise SystemExit(f"--save {error}") from None


def queue_again(wanted: bool) -> None:
    """Tell the batch script whether its job is to be queued again when this run ends.

    It looks for the file that REQUEUE_FILE names, and not at the exit status: launchers
    do not report that reliably, and a rank that is killed has none. ``hpcaccum run``
    starts a run again in the same job if there is a word in the file.
    """
    file = os.environ.get("REQUEUE_FILE")
    if file and wanted:
        Path(file).write_text("restart\n")
    elif file:
        Path(file).unlink(missing_ok=True)


def end_as_planned() -> None:
    """Tell ``hpcaccum run`` that this run was asked to stop, if it has a checkpoint.

    A run that has lost a rank has the same status. An empty file says that only another
    job continues this run.
    """
    file = Path(os.environ.get("REQUEUE_FILE", ""))
    if file.is_file():
        file.write_text("")


def facts(options: Options, widths: tuple[int, ...]) -> dict[str, Any]:
    """Return what must be the same in a run that continues, by option."""
    return {
        "--strategy": options.strategies[0],
        "--optimizer": options.optimizer,
        "network": "-".join(map(str, widths)),
        "shard groups": len(options.keepers(options.strategies[0])),
    }


def scaling(data: Dataset) -> dict[str, Any]:
    """Return how samples become inputs of the model, and the labels of its outputs."""
    return {"mean": data.mean, "deviation": data.deviation, "labels": data.labels}


def find(options: Options, rank: int, expected: dict[str, Any]) -> Any:
    """Return the checkpoint from which the model of a rank continues, or None.

    Compares it with the ``expected`` `facts` of this job.

    Raises:
        InvalidArgumentError: If the directory cannot be used, a checkpoint cannot be
            read or is of another run, or there is one and it is not wanted.
    """
    directory = directory_of(options, rank)
    if directory is None:
        return None
    _check_groups(options)
    check_directory("--save", directory)
    if not options.resume:
        if checkpoint.files(directory):
            raise InvalidArgumentError(
                f"--save: {directory} has checkpoints: add --resume to continue from "
                f"the last one, or use another directory"
            )
        return None
    try:
        found = checkpoint.load(directory)
    except (CheckpointError, OSError) as error:
        raise InvalidArgumentError(f"--resume: {error}") from None
    if found is not None:
        _check(found, expected, directory)
    return found


def _check_groups(options: Options) -> None:
    """Raise if there are checkpoints of models that this job would not continue."""
    assert options.save is not None
    keepers = options.keepers(options.strategies[0])
    own = [directory_of(options, rank) for rank in keepers]
    for place in (options.save, *sorted(options.save.glob("group-*"))):
        if place not in own and checkpoint.files(place):
            raise InvalidArgumentError(
                f"--save: {place} has checkpoints of a run with other --groups: use "
                f"another directory"
            )


def _check(found: Any, expected: dict[str, Any], directory: Path) -> None:
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


class Saver:
    """Writes the checkpoints of the model that a rank keeps, if it keeps one.

    Args:
        options, rank: Of this job.
        about: The `facts` of this job.
        data: Its `scaling` is saved with the model.
        snapshot: Returns that of the optimizer.
    """

    def __init__(
        self,
        options: Options,
        rank: int,
        about: dict[str, Any],
        data: Dataset,
        snapshot: Callable[[], dict[str, Any]],
    ) -> None:
        self._directory, self._every = directory_of(options, rank), options.every
        self._facts, self._snapshot = about, snapshot
        self._scaling = scaling(data)
        if self._directory:
            # From now on, an earlier job that still runs cannot save.
            with _ending_the_job(self._directory):
                take(self._directory)
        self.begin(0)

    def begin(self, step: int) -> None:
        """Count from a step and from now on."""
        self._last, self._at = step, time.monotonic()

    def passed(self, step: int) -> None:
        """Write one if it is time; the model has made ``step`` updates."""
        if self._directory is None or not self._is_due(step):
            return
        with _ending_the_job(self._directory):
            try:
                self._save(step)
            except OSError as error:
                # The training is worth more. The next may succeed, and the last must.
                logger.warning("--save: %s; training goes on", error)
        self.begin(step)

    def _is_due(self, step: int) -> bool:
        if self._every.updates:
            return step - self._last >= self._every.updates
        return time.monotonic() - self._at >= self._every.seconds

    def finish(self, step: int) -> None:
        """Write the last one, after the last update; end the job if that fails."""
        if self._directory is not None:
            with _ending_the_job(self._directory):
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
        state = {"facts": self._facts, "step": step, "optimizer": snapshot}
        checkpoint.save(self._directory, {**state, "data": self._scaling})
        # Also if the next error ends this run.
        queue_again(True)
