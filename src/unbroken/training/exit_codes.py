"""Makes a script that fails with one of our errors exit with the documented code of that error."""

from __future__ import annotations

import sys
from types import TracebackType

from unbroken.errors import UnbrokenError


class _ExitCodeHook:
    """A `sys.excepthook`: reports as the hook before it did, then exits with the error's own code."""

    def __init__(self) -> None:
        self.previous = sys.excepthook

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self.previous(kind, error, trace)
        if isinstance(error, UnbrokenError):
            # CPython honours SystemExit raised by the hook; there is no other way to set the code.
            raise SystemExit(error.exit_code)


def install_exit_codes() -> None:
    """Install the hook, once in a process."""
    if not isinstance(sys.excepthook, _ExitCodeHook):
        sys.excepthook = _ExitCodeHook()
