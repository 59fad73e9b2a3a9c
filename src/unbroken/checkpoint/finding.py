"""One thing that is wrong with a checkpoint. Apart from what verifies ours: readers of headers start fast."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is wrong: the file, and what was expected and found."""

    file: str
    problem: str
