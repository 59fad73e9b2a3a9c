"""Lines for people, on standard error."""

from __future__ import annotations

import sys
from contextlib import suppress


def tell(*lines: str) -> None:
    """Print `lines` after the name of the program."""
    if sys.stderr is None:
        # Closed from the start; `print` would take standard output instead.
        return
    # A closed terminal or pipe must not end a run, least of all one that has just saved its state.
    with suppress(OSError, ValueError):
        for line in lines:
            print(f"unbroken: {line}", file=sys.stderr, flush=True)
