"""The log: what a training was, an evaluation of the model each, and the results."""

from __future__ import annotations

import math
import os
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from hpcaccum import machine
from hpcaccum.device import device_name
from hpcaccum.files import JsonLines

if TYPE_CHECKING:
    from hpcaccum import Group
    from hpcaccum.train.data import Dataset
    from hpcaccum.train.options import Options
    from hpcaccum.train.records import Record, Result


class Log(JsonLines):
    """The file of ``--log``."""

    def start(self, facts: dict[str, Any]) -> None:
        """Write the `circumstances` of the training."""
        self.write({"event": "start", **_rounded(facts)})

    def record(self, record: Record) -> None:
        """Write one evaluation of the model."""
        self.write({"event": "look", **_rounded(asdict(record))})

    def result(self, result: Result) -> None:
        """Write the result of a run."""
        facts = asdict(result)
        del facts["records"]
        facts["updates_per_second"] = result.updates_per_second
        facts["samples_per_second"] = result.samples_per_second
        self.write({"event": "result", **_rounded(facts)})


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
    return {
        **machine.circumstances(group),
        "threads": os.environ.get("OMP_NUM_THREADS"),
        "device": device_name() if options.device == "cuda" else None,
        "data": {
            "name": data.name,
            "train": len(data.y),
            "test": len(data.y_test),
            "features": data.x.shape[1],
            "classes": data.classes,
        },
        "options": vars(options),
    }
