"""Trains nothing much, and holds on to more memory with every step.

python leaking_script.py RUN_DIR --leak-kb 256
"""

from __future__ import annotations

import argparse
import os
import random
import time
from typing import Any

import unbroken


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run_dir", nargs="?")
    parser.add_argument("--leak-kb", type=int, default=0)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--guard", default="auto")
    wanted = parser.parse_args()
    random.seed(7)
    counters = {"total": 0.0}
    leak = []
    guard: Any = wanted.guard
    with unbroken.Run(
        wanted.run_dir, save=[unbroken.EverySteps(40)], memory_guard=guard, counters=counters
    ) as run:
        for _epoch in run.epochs(1):
            for _number in run.batches(range(wanted.steps)):
                counters["total"] = 0.9 * counters["total"] + random.random()
                if wanted.leak_kb:
                    leak.append(os.urandom(1) * (wanted.leak_kb * 1024))
                    time.sleep(0.01)
                run.step(total=counters["total"])


if __name__ == "__main__":
    main()
