"""Going on inside an epoch, and what keeping the position costs: medians, and ratios to unbroken.

python benchmarks/position.py [--quick] [--rounds 5] [--json position.json]

resume   milliseconds from a loader that is built to its next batch, by position; with workers their start is
         in it. What an epoch that begins takes (torch draws the order of all samples) is in the column
         `begin`; the others have to be compared with it. `skip by replay` reads the batches up to the
         position again, as scripts without help do. Each has to come to the batch that comes next.
steps    microseconds that `next` takes between steps of 10 ms, the median; and the share of a step by which
         that is more than with a plain DataLoader.

Each number is from a process of its own, and in each round all peers have their turn, forth and back in
turns. StatefulDataLoader is compared if torchdata is installed.
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
SEED = 0
STEP_SECONDS = 0.010
# (samples consumed, samples in all, workers)
POSITIONS = (
    (1_000, 100_000, 0),
    (10_000, 100_000, 0),
    (100_000, 1_000_000, 0),
    (1_000_000, 2_000_000, 0),
    (1_000_000, 10_000_000, 0),
    (1_000, 100_000, 2),
    (100_000, 1_000_000, 2),
)
PEERS = ("unbroken", "unbroken elastic", "unbroken keyed", "StatefulDataLoader", "skip by replay")
PLAIN = "plain DataLoader"
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


def resume_seconds(peer: str, position: int, length: int, workers: int) -> dict[str, float]:
    """Return the seconds until the next batch, and those until the first batch of an epoch that begins."""
    count = position // BATCH
    began = time.perf_counter()
    first = iter(loader(length, workers))
    next(first)
    begin = time.perf_counter() - began
    del first
    state, expected = consumed(peer, count, length, workers)
    torch.manual_seed(SEED if peer == "skip by replay" else SEED + 1)
    source = build(peer, length, workers)
    began = time.perf_counter()
    if peer == "skip by replay":
        rest = islice(iter(source), count, None)
    elif peer == "StatefulDataLoader":
        source.load_state_dict(state)
        rest = iter(source)
    else:
        source.restore(state)
        rest = source.iterate(inside_epoch=True)
    found = next(rest)
    seconds = time.perf_counter() - began
    if not torch.equal(found[0], expected[0]):
        raise SystemExit(f"{peer}: expected the batch after {position} samples, found another one")
    return {"seconds": seconds, "begin_seconds": begin}


def consumed(peer: str, count: int, length: int, workers: int) -> tuple[Any, Any]:
    """Return the state after `count` batches, and the batch that comes next."""
    torch.manual_seed(SEED)
    source = build(peer, length, workers)
    running = batches(peer, source)
    for _ in islice(running, count):
        pass
    state: Any = None
    if peer != "skip by replay":
        state = source.state_dict() if peer == "StatefulDataLoader" else source.state()
    return state, next(running)


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
    torch.manual_seed(SEED)
    function = resume_seconds if kind == "resume" else step_seconds
    print(json.dumps(function(peer, *map(int, numbers))))


def median_of(runs: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


def in_turns(kind: str, peers: Sequence[str], rounds: int, *numbers: int) -> dict[str, dict[str, float]]:
    """Return the medians of each peer; what slows the machine down for a while meets all of them."""
    runs: dict[str, list[dict[str, float]]] = {peer: [] for peer in peers}
    for number in range(rounds):
        for peer in peers if number % 2 == 0 else reversed(peers):
            runs[peer].append(in_a_process(kind, peer, *numbers))
    return {peer: median_of(found) for peer, found in runs.items()}


def compare(rounds: int, steps: int, positions: Sequence[tuple[int, int, int]]) -> dict[str, Any]:
    peers = [peer for peer in PEERS if peer != "StatefulDataLoader" or importlib.util.find_spec("torchdata")]
    found: dict[str, Any] = {"resume": [], "steps": []}
    for position, length, workers in positions:
        where = {"position": position, "length": length, "workers": workers}
        medians = in_turns("resume", peers, rounds, position, length, workers)
        found["resume"].append({**where, "peers": medians})
    for workers in WORKERS:
        medians = in_turns("steps", [PLAIN, *peers[:-1]], rounds, workers, steps)
        found["steps"].append({"workers": workers, "peers": medians})
    return found


def tables(found: dict[str, Any]) -> list[str]:
    """Return both tables in Markdown."""
    names = list(found["resume"][0]["peers"])
    heads = ["position", "of", "workers", "begin ms", *(f"{name} ms" for name in names)]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for row in found["resume"]:
        ours = row["peers"]["unbroken"]["seconds"]
        begin = statistics.median(taken["begin_seconds"] for taken in row["peers"].values())
        taken_by = [row["peers"][name]["seconds"] for name in names]
        cells = [f"{1e3 * seconds:.4g} ({seconds / ours:.2g}x)" for seconds in taken_by]
        begins = [f"{row['position']:,}", f"{row['length']:,}", str(row["workers"]), f"{1e3 * begin:.3g}"]
        lines.append(f"| {' | '.join(begins + cells)} |")
    lines += [
        "",
        "| | workers | us a batch | of plain | more than plain | of a 10 ms step |",
        "|---" * 6 + "|",
    ]
    for row in found["steps"]:
        plain = row["peers"][PLAIN]["seconds"]
        for name, taken in row["peers"].items():
            more = taken["seconds"] - plain
            lines.append(
                f"| {name} | {row['workers']} | {1e6 * taken['seconds']:.0f} "
                f"| {taken['seconds'] / plain:.2f}x | {1e6 * more:.0f} | {more / STEP_SECONDS:.2%} |"
            )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="once, few steps, near positions")
    parser.add_argument("--rounds", type=int, default=5, help="processes for each number")
    parser.add_argument("--json", type=Path, help="where to keep the numbers")
    parser.add_argument("--measure", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        measure(*arguments.measure)
        return
    near = [where for where in POSITIONS if where[1] <= 100_000]
    found = compare(1, 100, near) if arguments.quick else compare(arguments.rounds, 300, POSITIONS)
    print("\n".join(tables(found)))
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
