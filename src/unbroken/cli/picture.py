"""A checkpoint as a page to look at: for `unbroken inspect --html`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import click

from unbroken.cli import checks, output, pages
from unbroken.cli.values import Section

_STDOUT = "-"
# These stand on the page in a form of their own.
_APART = ("Handlers", "Names")


def check_place(path: str) -> None:
    """Raise UsageError unless a page can be written there, before hours of reading."""
    if path != _STDOUT:
        pages.check_place(Path(path))


def write(
    path: str,
    found: Mapping[str, Any],
    *,
    lines: Iterable[str],
    sections: Iterable[Section],
) -> None:
    """Write the page of what `unbroken inspect --json` would show, and print its path.

    Raises UsageError if something else is there, and StorageError.
    """
    # Loaded here: only this needs it.
    from unbroken.dashboard import checkpoint_page

    check = found.get("verification")
    findings = [*found.get("problems", ()), *(check["findings"] if check is not None else ())]
    verdict = "" if check is None else checks.in_words(check)
    page = checkpoint_page.CheckpointPage(
        name=Path(found["path"]).name,
        lines=[click.unstyle(line) for line in lines],
        verdict=verdict or ("" if found.get("complete", True) else "INCOMPLETE"),
        is_bad=bool(findings),
        findings=list(dict.fromkeys(f"{one['file']}: {one['problem']}" for one in findings)),
        parts=found["parts"],
        tensors=found["tensors"],
        sections=[checkpoint_page.Section(*one) for one in sections if one[0] not in _APART],
    )
    text = checkpoint_page.checkpoint_page(page)
    if path == _STDOUT:
        output.data(text)
        return
    pages.write(Path(path), text)
    output.data(path)
