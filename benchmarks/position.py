"""Going on inside an epoch, and what keeping the position costs: medians, and ratios to unbroken.

python benchmarks/position.py [--quick] [--json position.json]

resume   seconds from a loader that is built to its next batch, by position. What an epoch that begins takes
         (torch draws the order of all samples) is the first column; the others have to be compared with it.
         `skip by replay` reads the batches up to the position again, as scripts without help do.
steps    microseconds that `next` takes between steps of 10 ms, the median; and the share of a step by which
         that is more than with a plain DataLoader.

Each number is from a process of its own. StatefulDataLoader is compared if torchdata is installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

import unbroken
from unbroken.frameworks.torch.keyed import KeyedLoader
from unbroken.frameworks.torch.loader import ResumableLoader

BATCH = 64
STEP_SECONDS = 0.010
# (samples consumed, samples in all)
POSITIONS = (
    (1_000, 100_000),
    (10_000, 100_000),
    (100_000, 1_000_000),
    (1_000_000, 2_000_000),
    (1_000_000, 10_000_000),
)
PEERS = ("unbroken", "unbroken elastic", "unbroken keyed", "StatefulDataLoader", "skip by replay")
WORKERS = (0, 2)


def loader(length: int, workers: int = 0, kind: type[DataLoader[Any]] = DataLoader, **options: Any) -> Any:
    data = TensorDataset(torch.arange(length))
    order = options or {"shuffle": True}
    return kind(data, BATCH, num_workers=workers, **order)


def build(peer: str, length: int, workers: int = 0) -> Any:
    if peer == "StatefulDataLoader":
        from torchdata.stateful_dataloader import StatefulDataLoader

        return loader(length, workers, StatefulDataLoader)
    if peer == "unbroken elastic":
        order = unbroken.ElasticSampler(range(length), rank=0, world_size=1)
        return ResumableLoader(loader(length, workers, sampler=order))
    plain = loader(length, workers)
    if peer == "unbroken":
        return ResumableLoader(plain)
    return KeyedLoader(plain, seed=0) if peer == "unbroken keyed" else plain


def batches(peer: str, source: Any) -> Iterator[Any]:
    return source.iterate() if peer.startswith("unbroken") else iter(source)


def resume_seconds(peer: str, position: int, length: int) -> dict[str, float]:
    """Return the seconds until the next batch, and those until the first batch of an epoch that begins."""
    count = position // BATCH
    began = time.perf_counter()
    next(iter(loader(length)))
    begin = time.perf_counter() - began
    source = build(peer, length)
    state: Any = None
    if peer != "skip by replay":
        running = batches(peer, source)
        for _ in islice(running, count):
            pass
        state = source.state_dict() if peer == "StatefulDataLoader" else source.state()
    source = build(peer, length)
    began = time.perf_counter()
    if peer == "skip by replay":
        rest = islice(iter(source), count, None)
    elif peer == "StatefulDataLoader":
        source.load_state_dict(state)
        rest = iter(source)
    else:
        source.restore(state)
        rest = source.iterate(inside_epoch=True)
    next(rest)
    return {"seconds": time.perf_counter() - began, "begin_seconds": begin}


def step_seconds(peer: str, workers: int, steps: int) -> dict[str, float]:
    """Return the median time of `next` in a loop of steps that keep the processor busy."""
    source = build(peer, BATCH * (steps + 10), workers)
    running = batches(peer, source)
    taken = []
    for _ in range(steps):
        began = time.perf_counter()
        next(running)
        end = time.perf_counter()
        taken.append(end - began)
        while time.perf_counter() < end + STEP_SECONDS:
            pass
    return {"seconds": statistics.median(taken[5:])}


def in_a_process(*arguments: object) -> dict[str, float]:
    command = [sys.executable, __file__, "--measure", *map(str, arguments)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(kind: str, peer: str, *numbers: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    function = resume_seconds if kind == "resume" else step_seconds
    print(json.dumps(function(peer, *map(int, numbers))))


def median_of(runs: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


def compare(repetitions: int, steps: int, positions: Sequence[tuple[int, int]]) -> dict[str, Any]:
    peers = [peer for peer in PEERS if peer != "StatefulDataLoader" or importlib.util.find_spec("torchdata")]
    found: dict[str, Any] = {"resume": [], "steps": []}
    for position, length in positions:
        for peer in peers:
            runs = [in_a_process("resume", peer, position, length) for _ in range(repetitions)]
            found["resume"].append({"peer": peer, "position": position, "length": length, **median_of(runs)})
    for workers in WORKERS:
        for peer in ["plain DataLoader", *peers[:-1]]:
            runs = [in_a_process("steps", peer, workers, steps) for _ in range(repetitions)]
            found["steps"].append({"peer": peer, "workers": workers, **median_of(runs)})
    return found


def tables(found: dict[str, Any]) -> list[str]:
    """Return both tables in Markdown."""
    peers = list(dict.fromkeys(run["peer"] for run in found["resume"]))
    lines = ["| position | of | begin ms | " + " | ".join(f"{peer} ms" for peer in peers) + " |"]
    lines.append("|---" * (len(peers) + 3) + "|")
    for position, length in dict.fromkeys((run["position"], run["length"]) for run in found["resume"]):
        row = {
            run["peer"]: run
            for run in found["resume"]
            if (run["position"], run["length"]) == (position, length)
        }
        ours = row["unbroken"]["seconds"]
        cells = [f"{1e3 * row[peer]['seconds']:.4g} ({row[peer]['seconds'] / ours:.2g}x)" for peer in peers]
        begin = statistics.median(run["begin_seconds"] for run in row.values())
        lines.append(f"| {position:,} | {length:,} | {1e3 * begin:.3g} | " + " | ".join(cells) + " |")
    lines += ["", "| | workers | us a batch | more than plain | of a 10 ms step |", "|---|---|---|---|---|"]
    for run in found["steps"]:
        plain = next(
            other["seconds"]
            for other in found["steps"]
            if other["workers"] == run["workers"] and other["peer"] == "plain DataLoader"
        )
        more = run["seconds"] - plain
        lines.append(
            f"| {run['peer']} | {run['workers']} | {1e6 * run['seconds']:.0f} | {1e6 * more:.0f} "
            f"| {more / STEP_SECONDS:.2%} |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="once, few steps, near positions")
    parser.add_argument("--json", type=Path, help="where to keep the numbers")
    parser.add_argument("--measure", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        measure(*arguments.measure)
        return
    found = compare(1, 100, POSITIONS[:2]) if arguments.quick else compare(5, 300, POSITIONS)
    print("\n".join(tables(found)))
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
