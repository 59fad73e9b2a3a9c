"""A deterministic script with a loop of its own: no batches of the run, no epochs, no framework's optimizer.

python bare_loop.py PLAN --run-dir DIRECTORY
"""

from __future__ import annotations

import os
import random
import sys

import unbroken

os.environ["UNBROKEN_REHEARSAL"] = sys.argv[1]
HELD = random.Random(4)


def noisy():
    source = random.Random(2)
    while True:
        yield source.random()


random.seed(0)
weights = {"w": 0.5}
history: list[float] = []
noise = noisy()
next(noise)

with unbroken.Run(sys.argv[3], weights=weights) as run:
    for _step in range(run.step_count, 20):
        weights["w"] += random.random() + HELD.random() + next(noise)
        history.append(weights["w"])
        run.step(w=weights["w"])
