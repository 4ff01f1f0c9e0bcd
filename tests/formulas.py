"""The tables of docs/growth.md, which say what calls cost, and their formulas."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "growth.md"

# The head of a column, and what `growth.costs` calls it.
COLUMNS = {
    "operations": "operations",
    "their bytes": "bytes",
    "round trips": "round_trips",
    "requests": "requests",
    "their bytes, at most": "request_bytes",
    "vectors": "vectors",
}


def formulas() -> dict[tuple[str, str], str]:
    """Return the formula of each call and column of the page."""
    found: dict[tuple[str, str], str] = {}
    columns: list[str] = []
    for line in PAGE.read_text().splitlines():
        if not line.startswith("|"):
            columns = []
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not columns:
            columns = cells[1:]
            continue
        for column, cell in zip(columns, cells[1:], strict=True):
            if column in COLUMNS and (formula := re.fullmatch("`(.+)`", cell)):
                call = cells[0].replace("`", "")
                found[call, COLUMNS[column]] = formula[1]
    return found


def check(costs: Mapping[str, Mapping[str, int]], ranks: int, nodes: int) -> None:
    """Compare costs that were counted with the formulas; all must have one."""
    table = formulas()
    counted = {(call, column) for call, cost in costs.items() for column in cost}
    assert counted == table.keys()
    wrong = []
    for (call, column), formula in table.items():
        said = eval(formula, {"ranks": ranks, "nodes": nodes})
        found = costs[call][column]
        if found > said if column == "request_bytes" else found != said:
            wrong.append(f"{call}: {found} {column}, not {formula} = {said}")
    assert not wrong, f"{ranks} ranks on {nodes} nodes: " + "; ".join(wrong)
