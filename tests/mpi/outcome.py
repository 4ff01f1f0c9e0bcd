"""What became of one phase of a test on one rank, and on all of them together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest


@dataclass(frozen=True)
class Outcome:
    """Anything but plain success of setup, call or teardown on one rank."""

    outcome: str
    text: str
    summary: str
    skipped_at: tuple[str, int, str] | None
    wasxfail: str | None

    @classmethod
    def of(cls, report: pytest.TestReport) -> Outcome | None:
        if report.passed:
            return None
        crash = getattr(report.longrepr, "reprcrash", None)
        lines = report.longreprtext.splitlines() or [""]
        return cls(
            outcome=report.outcome,
            text=report.longreprtext + _captured(report),
            summary=getattr(crash, "message", lines[-1]),
            skipped_at=report.longrepr if isinstance(report.longrepr, tuple) else None,
            wasxfail=getattr(report, "wasxfail", None),
        )


class Failure:
    """What rank 0 prints for a test that failed somewhere; ranks alike are one."""

    def __init__(self, outcomes: dict[int, Outcome]) -> None:
        self._texts: dict[str, list[int]] = {}
        for rank, outcome in outcomes.items():
            self._texts.setdefault(outcome.text, []).append(rank)
        first = min(outcomes)
        # What pytest looks for when it writes its one-line summary.
        self.reprcrash = _Crash(f"[rank {first}] {outcomes[first].summary}")

    def toterminal(self, writer: Any) -> None:
        for line in str(self).splitlines():
            writer.line(line, red=line.startswith(("E ", "[rank")))

    def __str__(self) -> str:
        return "\n".join(f"{_name(r)}\n{text}\n" for text, r in self._texts.items())


@dataclass(frozen=True)
class _Crash:
    message: str

    def __str__(self) -> str:
        return self.message


def merge(report: pytest.TestReport, outcomes: list[Outcome | None]) -> None:
    """Make ``report`` that of all ranks: failed if any is, else skipped if any is."""
    by_rank = {rank: outcome for rank, outcome in enumerate(outcomes) if outcome}
    failed = {rank: o for rank, o in by_rank.items() if o.outcome == "failed"}
    if failed:
        report.outcome = "failed"
        report.longrepr = Failure(failed)  # type: ignore[assignment]
        report.__dict__.pop("wasxfail", None)
    elif by_rank and report.passed:
        rank = min(by_rank)
        report.outcome = "skipped"
        path, line, reason = by_rank[rank].skipped_at or ("", 0, by_rank[rank].text)
        report.longrepr = (path, line, f"[rank {rank}] {reason}")
        if by_rank[rank].wasxfail is not None:
            report.wasxfail = by_rank[rank].wasxfail  # type: ignore[attr-defined]


def _captured(report: pytest.TestReport) -> str:
    return "".join(f"\n--- {name} ---\n{text}" for name, text in report.sections)


def _name(ranks: list[int]) -> str:
    return f"[rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}]"
