"""How much slower a script runs while it is rehearsed: steps of some length, with some state.

    python benchmarks/drill_overhead.py [--megabytes 100] [--milliseconds 50] [--steps 40] [--rounds 3]

Each round runs the script for real and rehearsed, in fresh processes, one after the other and in turns first.
"""

from __future__ import annotations

import argparse
import atexit
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

# The digests of the first steps wait for threads to start and for state to be made.
WARM_UP = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=float, default=100)
    parser.add_argument("--milliseconds", type=float, default=50)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    wanted = parser.parse_args()
    if wanted.child:
        train(wanted)
        return
    taken: dict[bool, list[float]] = {False: [], True: []}
    for number in range(wanted.rounds):
        for is_rehearsed in (False, True) if number % 2 == 0 else (True, False):
            taken[is_rehearsed].append(run(wanted, is_rehearsed=is_rehearsed))
        print(f"step {taken[False][-1]:6.1f} ms, rehearsed {taken[True][-1]:6.1f} ms", flush=True)
    ratio = statistics.median(taken[False]) / statistics.median(taken[True])
    print(f"{wanted.megabytes:.0f} MB of state: {ratio:.2f} of the speed ({os.cpu_count()} processors)")


def run(wanted: argparse.Namespace, *, is_rehearsed: bool) -> float:
    """Return the median length of a step in milliseconds."""
    from unbroken.rundir.rehearsal import PLAN_VARIABLE, Plan, write_plan

    with tempfile.TemporaryDirectory() as place:
        environment = {**os.environ, "UNBROKEN_BENCHMARK_DIR": place}
        if is_rehearsed:
            plan = Plan(directory=f"{place}/run", record=f"{place}/record", steps=wanted.steps)
            write_plan(plan, Path(place, "plan"))
            environment[PLAN_VARIABLE] = f"{place}/plan"
        arguments = [f"--{name}={getattr(wanted, name)}" for name in ("megabytes", "milliseconds", "steps")]
        command = [sys.executable, __file__, "--child", *arguments]
        subprocess.run(command, env=environment, check=True, stderr=subprocess.DEVNULL)
        times = [float(line) for line in Path(place, "times").read_text().split()]
    return 1000 * statistics.median(times[WARM_UP:])


def train(wanted: argparse.Namespace) -> None:
    """Train layers whose weights and moments have the wanted size, in steps of the wanted length."""
    import torch

    import unbroken

    place = Path(os.environ["UNBROKEN_BENCHMARK_DIR"])
    # A rehearsed script ends by itself.
    atexit.register(lambda: write_times(place / "times", times))
    torch.set_num_threads(1)
    layers = 12
    width = int((wanted.megabytes * 1e6 / 3 / 4 / layers) ** 0.5)
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(layers)))
    optimizer = torch.optim.AdamW(model.parameters())
    data = torch.utils.data.DataLoader(torch.randn(wanted.steps * 2, width), batch_size=2)
    times: list[float] = []
    with unbroken.Run(place / "run", save=[], model=model, optimizer=optimizer) as run:
        for _ in run.epochs(1):
            begun = time.perf_counter()
            for batch in run.batches(data):
                loss = model(batch).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                # As on a device, which the processor waits for.
                time.sleep(max(0.0, wanted.milliseconds / 1000 - (time.perf_counter() - begun)))
                run.step(loss=loss)
                times.append(begun)
                begun = time.perf_counter()


def write_times(place: Path, times: list[float]) -> None:
    place.write_text("\n".join(str(later - earlier) for earlier, later in itertools.pairwise(times)))


if __name__ == "__main__":
    main()
