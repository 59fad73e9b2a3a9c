"""What `run.step(loss=...)` costs, in microseconds a step: medians of alternating rounds.

python benchmarks/step_overhead.py
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable

import torch

import unbroken

ROUNDS, STEPS = 9, 2000


def microseconds(step: Callable[[], object]) -> float:
    began = time.perf_counter()
    for _ in range(STEPS):
        step()
    return 1e6 * (time.perf_counter() - began) / STEPS


def main() -> None:
    torch.set_num_threads(1)
    loss = torch.tensor(0.5)
    with tempfile.TemporaryDirectory() as folder, unbroken.Run(folder, save=[]) as run:
        kinds: dict[str, Callable[[], object]] = {
            "loss.item()": loss.item,
            "run.step()": run.step,
            "run.step(loss=loss)": lambda: run.step(loss=loss),
        }
        times: dict[str, list[float]] = {name: [] for name in kinds}
        for _ in range(ROUNDS):
            for name, step in kinds.items():
                times[name].append(microseconds(step))
    for name, found in times.items():
        print(f"{name:20} {statistics.median(found):7.1f} us a step")


if __name__ == "__main__":
    main()
