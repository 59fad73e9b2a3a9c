"""What the heartbeat costs: nanoseconds of processor time a beat, and a batch and step with and without it.

python benchmarks/heartbeat.py
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import unbroken
from unbroken.rundir.heartbeat import Heartbeat

ROUNDS, COUNT = 9, 20_000


class NoHeartbeat(Heartbeat):
    """One that shows nothing: what is left is the loop."""

    def beat(self, **_: Any) -> None:
        pass


def nanoseconds(act: Callable[[], object], count: int = COUNT) -> float:
    began = time.thread_time()
    for _ in range(count):
        act()
    return 1e9 * (time.thread_time() - began) / count


def loop(run: unbroken.Run) -> Iterator[None]:
    for _ in run.batches(range(10**9)):
        run.step()
        yield


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        heartbeat = Heartbeat(Path(folder) / "heartbeat")
        times: dict[str, list[float]] = {"a beat": [], "batch and step": [], "the same, no heartbeat": []}
        with unbroken.Run(f"{folder}/run", save=[]) as run:
            steps = loop(run)
            next(steps)
            pulse, real = run._pulse, run._pulse._heartbeat
            silent = NoHeartbeat(Path(folder) / "silent")
            for _ in range(ROUNDS):
                times["a beat"].append(
                    nanoseconds(lambda: heartbeat.beat(phase="training", step=7, checkpoint_step=-1))
                )
                for name, used in (("batch and step", real), ("the same, no heartbeat", silent)):
                    pulse._heartbeat = used
                    times[name].append(nanoseconds(lambda: next(steps), 2000))
            pulse._heartbeat = real
    for name, found in times.items():
        print(f"{name:24} {statistics.median(found):9,.0f} ns")
    first, second = (statistics.median(times[name]) for name in list(times)[1:])
    print(f"{'share of the loop':24} {100 * (first - second) / first:9.1f} %")


if __name__ == "__main__":
    main()
