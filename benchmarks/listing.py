"""List 10,000 tensors in each format, by `unbroken inspect` and by the library that wrote them, in turns.

python benchmarks/listing.py [--quick] [--repetitions N] [--results FILE]

Each listing is a fresh process that prints the name, the type and the shape of every tensor, its start
counted in: that is what a user waits for. The files are in the cache of the system, and all modules are
compiled, as those of an installed package are. The target: 0.3 s.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from machine import facts, one_line

OURS = "unbroken inspect"
UNBROKEN = str(Path(sys.executable).with_name("unbroken"))
TARGET_SECONDS = 0.3
THEIRS = {
    "safetensors": """
from safetensors import safe_open
with safe_open(PATH, "np") as file:
    for name in file.keys():
        found = file.get_slice(name)
        print(name, found.get_dtype(), found.get_shape())
""",
    "torch.save": """
import torch
for name, tensor in torch.load(PATH, mmap=True).items():
    print(name, tensor.dtype, tuple(tensor.shape))
""",
    "npz": """
import numpy
with numpy.load(PATH) as file:
    for name in file.files:
        print(name, file[name].dtype, file[name].shape)
""",
    "TensorFlow": """
import tensorflow
for name, shape in tensorflow.train.list_variables(PATH):
    print(name, shape)
""",
    "unbroken": None,
}


def write(kind: str, path: Path, count: int) -> None:
    import numpy as np

    arrays = {f"model/layers.{index}.weight": np.full(4, index, np.float32) for index in range(count)}
    if kind == "safetensors":
        importlib.import_module("safetensors.numpy").save_file(arrays, path)
    elif kind == "torch.save":
        torch = importlib.import_module("torch")
        torch.save({name: torch.from_numpy(array) for name, array in arrays.items()}, path)
    elif kind == "npz":
        np.savez(path.open("wb"), **arrays)
    else:
        import unbroken

        with unbroken.Run(path, background=False, weights=arrays) as run:
            run.step()


def listing(kind: str, path: Path, peer: str) -> list[str]:
    if peer == OURS:
        return [UNBROKEN, "inspect", str(path), "--tensors"]
    return [sys.executable, "-c", f"PATH = {str(path)!r}\n{THEIRS[kind]}"]


def written(directory: Path, count: int) -> dict[str, Path]:
    """Write one checkpoint of each kind, TensorFlow's by `unbroken convert`, and return where they are."""
    places = {kind: directory / kind.replace(".", "-") for kind in THEIRS}
    for kind, path in places.items():
        if kind != "TensorFlow":
            write(kind, path, count)
    places["TensorFlow"] = directory / "variables"
    command = [
        UNBROKEN,
        "convert",
        str(places["safetensors"]),
        f"{directory}/variables.index",
    ]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return places


def seconds_of(command: list[str], count: int, compiled: Path) -> float:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "3"}
    # Without it every start would compile what it imports, of ours and of theirs.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    environment["PYTHONPYCACHEPREFIX"] = str(compiled)
    began = time.perf_counter()
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True
    )
    took = time.perf_counter() - began
    if done.stdout.count(".weight") < count:
        raise SystemExit(f"{command[:4]}: expected {count} tensors, found {done.stdout.count('.weight')}")
    return took


def in_turns(places: dict[str, Path], count: int, repetitions: int, compiled: Path) -> list[dict[str, Any]]:
    turns = [(kind, peer) for kind in places for peer in (OURS, kind) if peer == OURS or THEIRS[kind]]
    runs = []
    # The first one fills the caches.
    for repetition in range(-1, repetitions):
        for kind, peer in random.Random(repetition).sample(turns, len(turns)):
            took = seconds_of(listing(kind, places[kind], peer), count, compiled)
            if repetition >= 0:
                runs.append({"kind": kind, "peer": peer, "repetition": repetition, "seconds": took})
    return runs


def table(runs: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for kind in THEIRS:
        of = {
            peer: [run["seconds"] for run in runs if (run["kind"], run["peer"]) == (kind, peer)]
            for peer in (OURS, kind)
        }
        found[kind] = {peer: statistics.median(values) for peer, values in of.items() if values}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="100 tensors, once: does it all work?")
    parser.add_argument("--repetitions", type=int, metavar="N", help="7, or 1 if quick")
    parser.add_argument("--results", type=Path, metavar="FILE", help="where to keep every single run")
    given = parser.parse_args()
    count = 100 if given.quick else 10_000
    with tempfile.TemporaryDirectory(prefix="benchmark-") as scratch:
        machine = facts(Path(scratch))
        places, repetitions = written(Path(scratch), count), given.repetitions or (1 if given.quick else 7)
        runs = in_turns(places, count, repetitions, Path(scratch) / "compiled")
    print(f"{count} tensors; {one_line(machine)}")
    for kind, seconds in table(runs).items():
        words = f"{kind:12} {OURS} {seconds[OURS]:.2f} s"
        if kind in seconds:
            ratio = seconds[kind] / seconds[OURS]
            words += f", its own library {seconds[kind]:.2f} s ({ratio:.1f} times as long)"
        print(words)
    print(f"target: {TARGET_SECONDS} s")
    if given.results:
        given.results.write_text(json.dumps({"machine": machine, "runs": runs}, indent=1) + "\n")


if __name__ == "__main__":
    main()
