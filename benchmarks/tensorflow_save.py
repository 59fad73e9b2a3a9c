"""Save 1.5 GB of Keras state, model and Adam, by unbroken and by tf.train.Checkpoint, in turns.

python benchmarks/tensorflow_save.py [--quick] [--repetitions N] [--directory DIR] [--results FILE]

Each save is made in a fresh process, the second one there counts, and it has ended when every byte and name
is durable. The targets: durable, and digested, at least 1.5 times as fast as tf.train.Checkpoint with fsync;
training blocked for at most 1.25 times as long as one copy of the memory takes.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from machine import facts, one_line
from observe import Watch, huge_pages, settle, sync_tree
from peers import IsDurable, Peer, wait_until
from states import StateSpec, spec_of

OURS, THEIRS, COPY = "unbroken", "tf.train.Checkpoint", "memory copy"
PEERS = (OURS, THEIRS, f"{THEIRS} async", COPY)
SAVES = 2
TARGETS = {"faster": 1.5, "blocked": 1.25}
LONGEST_SECONDS = 1800


class KerasState:
    """A model of the shapes of `spec` with an Adam that has its moments."""

    def __init__(self, spec: StateSpec) -> None:
        keras = importlib.import_module("keras")

        class Weights(keras.layers.Layer):  # type: ignore[misc, name-defined]
            """Holds weights of those shapes, each by the name of its parameter."""

            def build(self, _: object) -> None:
                self.kept = {
                    name: self.add_weight(
                        shape=shape, initializer="random_normal", name=name.replace(".", "_")
                    )
                    for name, shape in spec.shapes.items()
                }

        self.model = keras.Sequential([Weights()])
        self.model.build((None, 1))
        self.optimizer = keras.optimizers.Adam()
        self.optimizer.build(self.model.trainable_variables)
        self.variables = [*self.model.variables, *self.optimizer.variables]
        self.size_bytes = sum(
            variable.value.dtype.size * variable.value.shape.num_elements() for variable in self.variables
        )

    def train(self) -> None:
        """Change every variable, as a step does."""
        for variable in self.variables:
            variable.assign_add(variable * 0 + 1)


@contextmanager
def ours(state: KerasState, directory: Path) -> Iterator[Peer]:
    from journal_tail import JournalTail

    import unbroken

    # A run as it is by default; only retention is not what is measured.
    with ExitStack() as stack:
        live = unbroken.Run(directory / "run", save=[], keep=[], model=state.model, optimizer=state.optimizer)
        tails: list[Any] = []

        def prepare() -> None:
            stack.enter_context(live)
            tails.append(JournalTail(live))

        def save(path: Path) -> IsDurable:
            live.step()
            live.save()
            return tails[0].has_saved

        yield Peer(save=save, prepare=prepare)


@contextmanager
def theirs(state: KerasState, directory: Path, *, is_async: bool) -> Iterator[Peer]:
    import tensorflow as tf

    if is_async:
        # The variables of TensorFlow below: with those of Keras 3 itself its second asynchronous save raises.
        tracked = tf.train.Checkpoint(variables=[variable.value for variable in state.variables])
    else:
        tracked = tf.train.Checkpoint(model=state.model, optimizer=state.optimizer)
    options = tf.train.CheckpointOptions(enable_async=is_async)

    def save(path: Path) -> IsDurable:
        tracked.save(str(path / "state"), options=options)

        def has_saved() -> bool:
            if is_async:
                tracked.sync()
            sync_tree(path)
            return True

        return has_saved

    yield Peer(save=save)


@contextmanager
def copied(state: KerasState, directory: Path) -> Iterator[Peer]:
    import numpy as np

    # Memory that was used before, by one thread: what any copy of the state costs at least.
    memory = np.frombuffer(huge_pages(state.size_bytes), dtype=np.uint8)

    def save(path: Path) -> IsDurable:
        start = 0
        for variable in state.variables:
            view = np.asarray(memoryview(variable.value.value())).reshape(-1).view(np.uint8)
            memory[start : start + view.nbytes] = view
            start += view.nbytes
        return lambda: True

    yield Peer(save=save)


def opened(name: str, state: KerasState, directory: Path) -> Any:
    if name == OURS:
        return ours(state, directory)
    if name == COPY:
        return copied(state, directory)
    return theirs(state, directory, is_async=name != THEIRS)


def measure(given: argparse.Namespace) -> None:
    """Save a few times in this process, and print what the last save cost as one line of JSON."""
    state = KerasState(spec_of("gpt", is_quick=given.quick))
    with opened(given.peer, state, given.directory) as peer:
        peer.prepare()
        for index in range(SAVES):
            # Otherwise nothing would have changed since, and whoever notices that need not write at all.
            state.train()
            path = given.directory / f"{index}"
            path.mkdir()
            was_quiet = settle(state.size_bytes, given.quiet_wait)
            with Watch() as watch:
                is_durable = peer.save(path)
                blocked = watch.lap()
                wait_until(is_durable)
    record = {
        "peer": given.peer,
        "size_bytes": state.size_bytes,
        "tensors": len(state.variables),
        "seconds": watch.cost.seconds,
        "blocked_seconds": blocked,
        "cpu_seconds": watch.cost.cpu_seconds,
        "was_quiet": was_quiet,
    }
    print(json.dumps(record), flush=True)


def in_turns(given: argparse.Namespace, scratch: Path) -> list[dict[str, Any]]:
    runs = []
    for repetition in range(given.repetitions):
        # In no fixed order, so that nobody always comes after the same neighbour.
        for peer in random.Random(repetition).sample(PEERS, len(PEERS)):
            print(f"{repetition + 1}/{given.repetitions} {peer}", file=sys.stderr, flush=True)
            directory = Path(tempfile.mkdtemp(dir=scratch))
            command = [sys.executable, __file__, "--peer", peer, "--directory", str(directory)]
            command += ["--quiet-wait", str(given.quiet_wait), *(["--quick"] if given.quick else [])]
            done = subprocess.run(
                command,
                env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "3"},
                stdout=subprocess.PIPE,
                text=True,
                check=True,
                timeout=LONGEST_SECONDS,
            )
            shutil.rmtree(directory)
            runs.append({"repetition": repetition, **json.loads(done.stdout.splitlines()[-1])})
    return runs


def medians(runs: list[dict[str, Any]], field: str) -> dict[str, float]:
    return {peer: statistics.median(run[field] for run in runs if run["peer"] == peer) for peer in PEERS}


def summary(runs: list[dict[str, Any]]) -> dict[str, float]:
    """Return how the medians stand to each other, as the targets say it."""
    seconds, blocked = medians(runs, "seconds"), medians(runs, "blocked_seconds")
    return {
        "faster": seconds[THEIRS] / seconds[OURS],
        "faster_than_async": seconds[f"{THEIRS} async"] / seconds[OURS],
        "blocked": blocked[OURS] / blocked[COPY],
    }


def table(runs: list[dict[str, Any]]) -> str:
    fields: dict[str, Callable[[float], str]] = {
        "seconds": lambda value: f"{value:8.3f} s durable",
        "blocked_seconds": lambda value: f"{value:8.3f} s blocked",
        "cpu_seconds": lambda value: f"{value:8.2f} s of CPU",
    }
    found = {field: medians(runs, field) for field in fields}
    return "\n".join(
        f"{peer:26}" + " ".join(show(found[field][peer]) for field, show in fields.items()) for peer in PEERS
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a state fifty times smaller: does it all work?")
    parser.add_argument("--repetitions", type=int, metavar="N", help="5, or 1 if quick")
    parser.add_argument("--directory", type=Path, help="where to write (default: build/ of this repository)")
    parser.add_argument("--results", type=Path, metavar="FILE", help="where to keep every single run")
    parser.add_argument("--quiet-wait", type=float, metavar="SECONDS", help="how long to wait for quiet (25)")
    parser.add_argument("--peer", choices=PEERS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    given.quiet_wait = given.quiet_wait if given.quiet_wait is not None else (1 if given.quick else 25)
    if given.peer:
        measure(given)
        return
    given.repetitions = given.repetitions or (1 if given.quick else 5)
    work = given.directory or Path(__file__).resolve().parents[1] / "build"
    work.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="benchmark-", dir=work) as scratch:
        machine = facts(Path(scratch))
        runs = in_turns(given, Path(scratch))
    found = summary(runs)
    print(f"{runs[0]['size_bytes'] / 1e9:.2f} GB in {runs[0]['tensors']} tensors; {one_line(machine)}")
    print(table(runs))
    print(f"{found['faster']:.2f} times as fast as {THEIRS} with fsync (target {TARGETS['faster']})")
    print(f"blocked for {found['blocked']:.2f} copies of the memory (target at most {TARGETS['blocked']})")
    if given.results:
        record = {"machine": machine, "targets": TARGETS, "ratios": found, "runs": runs}
        given.results.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
