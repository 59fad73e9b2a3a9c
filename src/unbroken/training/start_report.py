"""What a run began from, as values and in words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from unbroken.training.comparison import Amount
from unbroken.training.restored import Restored


@dataclass(frozen=True, slots=True, kw_only=True)
class StartReport:
    """What a run began from: `parts` got so much of `source`, with the differences that were `allowed`.

    `fresh` are the parts that began as the script built them; `notes` say what is not in such a checkpoint.
    `step` is where the run begins to count.
    """

    source: str
    parts: Mapping[str, Amount]
    fresh: tuple[str, ...]
    allowed: tuple[str, ...]
    notes: tuple[str, ...]
    step: int = 0

    def lines(self) -> list[str]:
        """Return the report for people, a line each."""
        taken = [f"{name} {amount.tensors:,} tensors" for name, amount in self.parts.items()]
        size = sum(amount.size_bytes for amount in self.parts.values())
        lines = [f"begins from {self.source}: {', '.join(taken)}, {size:,} bytes"]
        lines += [f"{name}: begins as the script built it" for name in self.fresh]
        return lines + [f"begins with a difference: {line}" for line in self.allowed] + list(self.notes)

    def as_json(self) -> dict[str, Any]:
        """Return the report as plain values; fields are only ever added."""
        return {
            "source": self.source,
            "parts": {
                name: {"tensors": amount.tensors, "bytes": amount.size_bytes}
                for name, amount in self.parts.items()
            },
            "fresh": list(self.fresh),
            "allowed": list(self.allowed),
            "notes": list(self.notes),
            "step": self.step,
        }


def start_report(source: str, restored: Restored, notes: list[str], *, step: int) -> StartReport:
    """Return the report on parts that were `restored` from `source`, with what else is to be said."""
    reports = {name: report for name, report in restored.parts.items() if report.handler}
    absent = [name for name, report in reports.items() if _is_absent(report)]
    return StartReport(
        source=source,
        parts={
            name: report.matched
            for name, report in reports.items()
            if not report.is_fresh and name not in absent
        },
        fresh=tuple(name for name, report in reports.items() if report.is_fresh),
        allowed=tuple(f"{name}: {item}" for name, report in reports.items() for item in report.allowed),
        notes=(*map(str, restored.settings), *notes),
        step=step,
    )


def _is_absent(report: Any) -> bool:
    """Tell whether one side lacks the part as a whole."""
    return any(not item.name for item in report.allowed)
