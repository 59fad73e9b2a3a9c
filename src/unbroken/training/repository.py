"""The commit that a script was started from, as git tells it: quickly, or not at all."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from blake3 import blake3

# Training waits for this at its start. A repository that takes longer to compare is reported as unknown.
BUDGET_SECONDS = 2.0
_AFTER_KILL_SECONDS = 0.5
_PIECE_BYTES = 1 << 16
# Nothing of the repository is run or written, and nothing is asked or fetched. `diff` alone writes to the
# index in spite of GIT_OPTIONAL_LOCKS, where it finds only the date of a file changed.
_QUIET = (
    "-c",
    "core.fsmonitor=false",
    "-c",
    f"core.hooksPath={os.devnull}",
    "-c",
    "diff.autoRefreshIndex=false",
)
_SETTINGS = {
    "GIT_OPTIONAL_LOCKS": "0",
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_NO_LAZY_FETCH": "1",
    "LC_ALL": "C",
}
# They would lead to another repository than that of the script.
_MISLEADING = frozenset({"GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX"})
# The form of the text must not depend on the user's settings: two states are told apart by its digest.
_DIFF = (
    "diff",
    "HEAD",
    "--full-index",
    "--no-color",
    "--no-ext-diff",
    "--no-textconv",
    "--no-renames",
    "--no-prefix",
    "--no-relative",
    "--diff-algorithm=myers",
    "--no-indent-heuristic",
    "--unified=0",
    "--inter-hunk-context=0",
    "--ignore-submodules=dirty",
    "--",
)


def repository(places: Iterable[Path], budget_seconds: float = BUDGET_SECONDS) -> dict[str, object] | None:
    """Return what is checked out in the git repository that holds the first of `places` that is in one.

    `commit`; `branch`, None if detached; `dirty`, whether tracked files differ from the commit; and
    `changes`, the digest of how they differ, None if they do not. Both are None where git took too long.
    Returns None without git, without a repository, or without a commit. Never raises.
    """
    place = next((place for place in places if _is_in_repository(place)), None)
    if place is None:
        return None
    deadline = time.monotonic() + budget_seconds
    try:
        # At once: what takes long is to compare the files, and the rest need not wait for it.
        with (
            _Asked(place, _DIFF) as difference,
            _Asked(place, ("rev-parse", "HEAD", "--abbrev-ref", "HEAD")) as head,
        ):
            words = bytearray()
            if not head.answered(words.extend, deadline):
                return None
            commit, _, branch = bytes(words).decode(errors="replace").strip().partition("\n")
            return {
                "commit": commit,
                "branch": None if branch == "HEAD" else branch,
                **_changes(difference, deadline),
            }
    except OSError:
        return None


def _changes(asked: _Asked, deadline: float) -> dict[str, object]:
    found = _Difference()
    if not asked.answered(found.receive, deadline):
        return {"dirty": None, "changes": None}
    return {"dirty": found.is_one, "changes": found.digest() if found.is_one else None}


class _Difference:
    """The digest of what git prints of a difference, less the files of which only the date differs."""

    def __init__(self) -> None:
        self.is_one = False
        self._digest = blake3()
        self._head = self._unfinished = b""

    def receive(self, piece: bytes) -> None:
        *lines, self._unfinished = (self._unfinished + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"diff --git "):
                # All there is of a file that has not changed after all.
                self._head = line
                continue
            self.is_one = True
            self._digest.update(self._head + line + b"\n")
            self._head = b""

    def digest(self) -> str:
        return self._digest.hexdigest()


def _is_in_repository(place: Path) -> bool:
    # Saves starting git where there is nothing to ask it.
    try:
        return any((directory / ".git").exists() for directory in (place, *place.parents))
    except OSError:
        return False


class _Asked:
    """One question to git, running beside us. Left, it is ended, with all that it has started."""

    def __init__(self, place: Path, arguments: Iterable[str]) -> None:
        self._command = ["git", *_QUIET, "-C", str(place), *arguments]

    def __enter__(self) -> _Asked:
        kept = {name: value for name, value in os.environ.items() if name not in _MISLEADING}
        self._process = subprocess.Popen(
            self._command,
            env={**kept, **_SETTINGS},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            process_group=0,
        )
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdout is not None
        self._process.stdout.close()
        if self._process.poll() is None:
            try:
                os.killpg(self._process.pid, signal.SIGKILL)
                # Not for ever: on a file system that hangs even a killed process stays.
                self._process.wait(_AFTER_KILL_SECONDS)
            except (OSError, subprocess.TimeoutExpired):
                return

    def answered(self, receive: Callable[[bytes], object], deadline: float) -> bool:
        """Hand the answer to `receive`, in pieces; tell whether it came in time and was no refusal."""
        assert self._process.stdout is not None
        stream = self._process.stdout.fileno()
        with selectors.DefaultSelector() as selector:
            selector.register(stream, selectors.EVENT_READ)
            while (left := deadline - time.monotonic()) > 0 and selector.select(left):
                piece = os.read(stream, _PIECE_BYTES)
                if not piece:
                    return self._ended_well(deadline)
                receive(piece)
        return False

    def _ended_well(self, deadline: float) -> bool:
        try:
            return self._process.wait(max(0.0, deadline - time.monotonic())) == 0
        except subprocess.TimeoutExpired:
            return False
