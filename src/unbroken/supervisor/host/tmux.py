"""A window on the log of a run, in tmux. Only a view: ending it, or all of tmux, does not touch the run."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

from unbroken.errors import UnbrokenError, UsageError


def check_tmux() -> None:
    """Raise UsageError if there is no tmux, before anything is started."""
    if shutil.which("tmux") is None:
        raise UsageError("--tmux: expected tmux to be installed, found no such command", hint="use --detach")


def session_name(run_name: str) -> str:
    """Return the name of the tmux session of a run; dots and colons mean something to tmux.

    >>> session_name("digits-0.1")
    'digits-0_1'
    """
    return re.sub(r"[.:\s]", "_", run_name)


def open_window(directory: Path, run_name: str) -> str:
    """Open a window that follows the output of the run in `directory`, and return the name of its session.

    Raises UnbrokenError if tmux refuses.
    """
    session = session_name(run_name)
    follow = [sys.executable, "-P", "-m", "unbroken.cli.main", "logs", "-f", str(directory)]
    # A window that is still there shows an earlier start, or another run of that name; who attaches next
    # is to see the new one.
    is_new = _tmux("has-session", "-t", f"={session}").returncode != 0
    where = ["new-session", "-d", "-s", session] if is_new else ["new-window", "-t", f"={session}:"]
    # What the run said last stays to be seen; set in the same call, as a short run is over before another.
    done = _tmux(*where, "-n", "log", *follow, ";", "set-option", "-w", "-t", f"={session}:", *_STAYS)
    if done.returncode != 0:
        raise UnbrokenError(
            f"tmux opened no window: {done.stderr.strip()}",
            hint=f"the run goes on without it; `unbroken logs -f {directory}` shows it",
        )
    return session


_STAYS = ("remain-on-exit", "on")


def _tmux(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["tmux", *arguments], capture_output=True, text=True, check=False)
