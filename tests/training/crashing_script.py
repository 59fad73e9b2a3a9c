"""A script that dies while it restores certain checkpoints.

    python crashing_script.py RUN_DIR STEPS HOW AT,AT... RESUME

Trains STEPS further steps, each saved; dies HOW (see `DEATHS`) when the state of a step AT is put back.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any

import unbroken

DEATHS: dict[str, Callable[[], object]] = {
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "segfault": lambda: ctypes.string_at(0),
}


class Fragile:
    """Counts steps, and dies of some."""

    def __init__(self, how: str, deadly: list[int]) -> None:
        self.steps = 0
        self._die = DEATHS[how]
        self._deadly = deadly

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["steps"] in self._deadly:
            self._die()
        self.steps = state["steps"]


def main() -> None:
    directory, count, how, deadly, resume = sys.argv[1:]
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    fragile = Fragile(how, [int(step) for step in deadly.split(",") if step])
    save = [unbroken.EverySteps(1)]
    with unbroken.Run(directory, save=save, keep=[], resume=resume, fragile=fragile) as run:
        for _ in range(int(count)):
            fragile.steps += 1
            run.step()


if __name__ == "__main__":
    main()
