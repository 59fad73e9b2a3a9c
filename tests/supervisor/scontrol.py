"""A program that takes the place of Slurm's `scontrol`."""

from __future__ import annotations

import os
import time
from pathlib import Path

_TEXT = """#!/bin/sh
echo "$@" >> {calls}
end={end}
test "${{SLURM_TIME_FORMAT:-standard}}" = standard || end=$(date +"$SLURM_TIME_FORMAT")
test "$1" = show && echo "JobId=77 JobState={state} EndTime=$end Deadline=N/A"
exit {code}
"""


class Scontrol:
    """Tells of a job that ends in `seconds`; `calls` are those of it, by `path` it is found."""

    def __init__(self, place: Path, *, seconds: float = 3600, state: str = "RUNNING", code: int = 0) -> None:
        programs = place / "programs"
        programs.mkdir()
        self._calls = place / "calls"
        self.path = f"{programs}:{os.environ['PATH']}"
        self.end_seconds = int(time.time() + seconds)
        end = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(self.end_seconds))
        script = programs / "scontrol"
        script.write_text(_TEXT.format(calls=self._calls, end=end, state=state, code=code))
        script.chmod(0o755)

    @property
    def calls(self) -> list[str]:
        """The arguments of each call, a line each."""
        return self._calls.read_text().splitlines() if self._calls.exists() else []
