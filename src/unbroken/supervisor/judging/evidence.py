"""What an attempt left in words: tracebacks in its output, what its launcher said of its ranks."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from unbroken.errors import StorageError
from unbroken.rundir.files import read_json
from unbroken.supervisor.judging.verdict import ExitStatus, RankFailure, SeenException, exit_status

_TAIL_BYTES = 32 * 1024
# What launchers put before the lines of a rank.
# The launcher's prefix, and behind it that of torch itself.
_RANK = re.compile(r"^(?:\[(?:rank|default)\d+\]:\s?)+")
_FRAME = re.compile(r'\s+File "(?P<file>[^"]+)", line (?P<line>\d+)(?:, in (?P<function>.+))?')
_EXCEPTION = re.compile(r"(?P<kind>[A-Za-z_][\w.]*)(?:: (?P<message>.*))?")
_NOT_OWN = re.compile(r"[/\\](site|dist)-packages[/\\]|[/\\]lib[/\\]python3[^/\\]*[/\\]|^<frozen ")
# How our own errors show their hint in a traceback.
_HINT = "hint: "
# What Python prints of the collection of garbage, which ends nothing, and of threads, which end alone.
_IGNORED = "Exception ignored in"
_IN_THREAD = "Exception in thread"
# A launcher's exception about its ranks says nothing of its own.
_OF_LAUNCHERS = ("ChildFailedError",)
# A message may have further lines, and loggers say goodbye.
_LINES_AFTER_THE_LAST = 5
_ROOT_CAUSE = "Root Cause (first observed failure):"
_RANK_NUMBER = re.compile(r"rank\s*: (\d+)")
_RANK_EXIT = re.compile(r"exitcode\s*: (-?\d+) \(pid: (\d+)\)")


def read_tail(path: Path) -> str:
    """Return the last part of the text in `path`, enough for a traceback; empty if there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            return file.read(_TAIL_BYTES).decode(errors="replace")
    except OSError:
        # Only an explanation is lost with it.
        return ""


def last_exception(output: str) -> SeenException | None:
    """Return the last exception whose traceback Python printed in `output`, or None.

    It need not be what ended the process: a program may print a traceback and go on.
    """
    lines = [_RANK.sub("", line, count=1) for line in output.splitlines()]
    found = list(_exceptions(lines))
    return found[-1] if found else None


def rank_failure(output: str) -> RankFailure | None:
    """Return what torchrun printed as the root cause of a failure at the end of `output`, or None."""
    _, mark, table = output.rpartition(_ROOT_CAUSE)
    rank, ended = _RANK_NUMBER.search(table), _RANK_EXIT.search(table)
    if not mark or rank is None or ended is None:
        return None
    code = int(ended[1])
    status = ExitStatus(signal_number=-code) if code < 0 else exit_status(code << 8)
    return RankFailure(rank=int(rank[1]), process_id=int(ended[2]), status=status)


def read_error_file(path: Path) -> SeenException | None:
    """Return the exception that a program of torch's elastic launcher left in `path`, or None.

    Launchers hand it on from the rank that failed first, if its main function is marked by `@record`.
    """
    try:
        value = read_json(path)
        if value is None:
            return None
        message = value["message"]
        text = message if isinstance(message, str) else str(message["extraInfo"]["py_callstack"])
    except (StorageError, KeyError, TypeError):
        # Another program's file: what is not understood explains nothing.
        return None
    return last_exception(text)


def _exceptions(lines: list[str]) -> Iterator[SeenException]:
    frames: list[tuple[str, str]] = []
    is_ignored = is_in_thread = False
    for index, line in enumerate(lines):
        at = _FRAME.fullmatch(line)
        if at is not None:
            within = f" in {at['function']}" if at["function"] else ""
            frames.append((at["file"], f"{at['file']}:{at['line']}{within}"))
        elif line.startswith((_IGNORED, _IN_THREAD)):
            is_ignored, is_in_thread = line.startswith(_IGNORED), line.startswith(_IN_THREAD)
        elif frames and line and not line[0].isspace():
            # The first line after the frames that is not indented names the exception.
            named = _EXCEPTION.fullmatch(line)
            if named is not None and not is_ignored and not named["kind"].endswith(_OF_LAUNCHERS):
                below = lines[index + 1 :]
                is_hinted = bool(below) and below[0].startswith(_HINT)
                yield SeenException(
                    kind=named["kind"],
                    message=named["message"] or "",
                    frame=_own(frames),
                    hint=below[0].removeprefix(_HINT) if is_hinted else "",
                    is_last=len(below) <= _LINES_AFTER_THE_LAST and not is_in_thread,
                )
            frames = []
            is_ignored = is_in_thread = False


def _own(frames: list[tuple[str, str]]) -> str:
    """Return the innermost frame of the user's own code, or of any if there is none."""
    own = [text for file, text in frames if not _NOT_OWN.search(file)]
    return own[-1] if own else frames[-1][1]
