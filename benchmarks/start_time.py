"""How long the command line takes to start: the median of 15 processes each, beside bare Python.

python benchmarks/start_time.py
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from unbroken.rundir.identity import open_run

PROCESSES = 15


def milliseconds(command: list[str]) -> float:
    began = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return 1000 * (time.perf_counter() - began)


def main() -> None:
    unbroken = str(Path(sys.executable).with_name("unbroken"))
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        open_run(run)
        commands = {
            "python -c pass": [sys.executable, "-c", "pass"],
            "unbroken --help": [unbroken, "--help"],
            "unbroken ls": [unbroken, "ls", str(run)],
            "unbroken status": [unbroken, "status", str(run)],
        }
        # Alternating, so that a busy moment of the machine hits all alike.
        times: dict[str, list[float]] = {name: [] for name in commands}
        for _ in range(PROCESSES):
            for name, command in commands.items():
                times[name].append(milliseconds(command))
    bare = statistics.median(times["python -c pass"])
    for name, found in times.items():
        median = statistics.median(found)
        times_bare = f"{median / bare:4.1f} x bare Python"
        print(f"{name:16}  median {median:5.0f} ms   min {min(found):5.0f} ms   {times_bare}")


if __name__ == "__main__":
    main()
