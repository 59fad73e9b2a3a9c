"""What a resume has proved: what was restored is what was saved, and steps done again are as before. Pure."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from unbroken.training.health.repeated import Repeated
from unbroken.training.report import RestoreReport


def certificate(report: RestoreReport, found: Repeated) -> dict[str, Any]:
    """Return the fields of the event "resume-certificate"; fields are only ever added."""
    inexact, first = not_exact(report), found.first_difference
    return {
        "checkpoint": report.checkpoint,
        "digests_equal": not inexact,
        "not_exact": inexact,
        "repeated_steps": found.repeated_steps,
        "equal_steps": found.equal_steps,
        "first_difference": None if first is None else asdict(first),
        "largest_relative_difference": found.largest_relative_difference,
        "others_that_differ": sorted(found.others),
    }


def not_exact(report: RestoreReport) -> list[str]:
    """Return the parts, and settings in parts, that the script wants otherwise than in the checkpoint.

    All the rest was compared with it when it was restored: where its digests differ, a resume is refused.
    """
    parts = [name for name, part in report.parts.items() if not part.is_exact]
    settings = [f"{one.part}.{one.setting.key}" for one in report.settings if one.script_wins]
    return list(dict.fromkeys((*parts, *settings)))


def difference_in_words(report: RestoreReport, found: Repeated) -> list[str]:
    """Return lines for people about steps that are not what they were; none if all are."""
    first = found.first_difference
    if first is None:
        return []
    inexact = not_exact(report)
    found_out = "the program or its data have changed, something is in no part, or not deterministic"
    why = f"{', '.join(inexact)} began otherwise" if inexact else found_out
    return [
        f"of {found.repeated_steps} steps that were done again since {report.checkpoint}, "
        f"{found.equal_steps} are as before; the first that is not is step {first.step}: {first.metric} "
        f"{first.here!r}, before {first.there!r} (largest relative difference "
        f"{found.largest_relative_difference:.3g})",
        f"{why}; `unbroken drill` finds out what",
    ]
