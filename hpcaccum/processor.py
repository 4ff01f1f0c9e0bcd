"""Which machine this is, and which ones a file of figures is of."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcaccum.errors import counted

if TYPE_CHECKING:
    from collections.abc import Mapping

# Names of hosts that are shown.
_MOST_HOSTS = 3


def processor_name() -> str:
    """Return the model of the processor, or its architecture if that is all."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        name, _, model = line.partition(":")
        if name.strip() == "model name":
            return " ".join(model.split())
    return platform.processor() or platform.machine()


def place_and_date(facts: Mapping[str, Any]) -> str:
    """Return the hosts, the number of nodes and the day of a job, for its pictures."""
    hosts = [*facts["hosts"]] if isinstance(facts.get("hosts"), dict) else ["?"]
    where = ", ".join(hosts[:_MOST_HOSTS])
    if len(hosts) > _MOST_HOSTS:
        where += f" and {len(hosts) - _MOST_HOSTS} more"
    nodes = facts.get("nodes", len(hosts))
    day = str(facts.get("date", facts.get("time", "?")))[:10]
    return f"{where}; {counted(nodes, 'node')}; {day}"
