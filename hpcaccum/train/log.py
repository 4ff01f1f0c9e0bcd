"""The log: one JSON object per line, flushed at once so that a crash loses nothing."""

from __future__ import annotations

import datetime
import json
import math
import os
import platform
from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

import hpcaccum
from hpcaccum.device import device_name
from hpcaccum.mpi import MPI
from hpcaccum.output_files import ending_the_job, open_output

if TYPE_CHECKING:
    from pathlib import Path

    from hpcaccum import Group
    from hpcaccum.train.data import Dataset
    from hpcaccum.train.options import Options
    from hpcaccum.train.records import Record, Result


class Log:
    """A JSON-lines file.

    Args:
        path: File to overwrite; None writes nothing.

    Raises:
        InvalidArgumentError: If the file cannot be written.
    """

    def __init__(self, path: Path | None) -> None:
        self._path, self._file = path, open_output("--log", path)

    def write(self, event: str, facts: Any) -> None:
        """Write one line."""
        if self._file:
            line = json.dumps({"event": event, **facts}, default=str)
            with ending_the_job("--log", self._path):
                self._file.write(line + "\n")
                self._file.flush()

    def record(self, record: Record) -> None:
        """Write one evaluation of the model."""
        self.write("look", _rounded(asdict(record)))

    def result(self, result: Result) -> None:
        """Write the result of a run."""
        facts = asdict(result)
        del facts["records"]
        facts["updates_per_second"] = result.updates_per_second
        facts["samples_per_second"] = result.samples_per_second
        self.write("result", _rounded(facts))

    def close(self) -> None:
        """Close the file."""
        if self._file:
            self._file.close()


def _rounded(fact: Any) -> Any:
    if isinstance(fact, dict):
        return {name: _rounded(value) for name, value in fact.items()}
    if isinstance(fact, (tuple, list)):
        return [_rounded(value) for value in fact]
    if isinstance(fact, float):
        # JSON has no NaN, the loss of a training that diverged.
        return round(fact, 6) if math.isfinite(fact) else None
    return fact


def circumstances(options: Options, data: Dataset, group: Group) -> dict[str, Any]:
    """Return the versions, machines and options of a run. Collective."""
    hosts = Counter(group.allgather(MPI.Get_processor_name(), "names of the hosts"))
    name, version = MPI.get_vendor()
    return {
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat("T", "seconds"),
        "ranks": group.size,
        "hosts": dict(hosts),
        "cores": os.cpu_count(),
        "threads": os.environ.get("OMP_NUM_THREADS"),
        "mpi": f"{name} {'.'.join(map(str, version))}",
        "python": platform.python_version(),
        "numpy": np.__version__,
        "device": device_name() if options.device == "cuda" else None,
        "hpcaccum": hpcaccum.__version__,
        "data": {
            "name": data.name,
            "train": len(data.y),
            "test": len(data.y_test),
            "features": data.x.shape[1],
            "classes": data.classes,
        },
        "options": asdict(options),
    }
