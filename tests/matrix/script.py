"""Trains several rows of the matrix side by side in one run, each with a model of its own.

    python script.py RUN_DIR ROWS.json --stop kill:7

Its seed differs in every process once the run exists: what is not restored shows in the losses. At the
end it writes what it holds to RUN_DIR.final.json itself, so that nothing rests on what a checkpoint has.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

import unbroken
from unbroken.rundir.control import clear_stop, request_stop

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.matrix.builders import WORDS
from tests.matrix.covering import Row
from tests.matrix.factors import BATCHES_PER_EPOCH, EPOCHS, SAVED_BEFORE
from tests.matrix.trained import Trained

torch.set_num_threads(1)

BATCH_SIZE = 4
EXIT_CODE = 7
AT_ONCE = ("kill", "exit")


class Noisy(Dataset[tuple[torch.Tensor, ...]]):
    def __len__(self) -> int:
        return BATCH_SIZE * BATCHES_PER_EPOCH - 2

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        noise = torch.randn(6) + float(np.random.rand()) + random.random()
        return noise + index / 30, torch.tensor(index % WORDS), torch.tensor(index % 3), torch.tensor(index)


def strike(how: str, run: unbroken.Run) -> None:
    """Stop this run: at once, or by a request that it obeys when it can."""
    if how in AT_ONCE:
        # What was asked for is on disk: as much is lost each time.
        run._saver.wait()
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "exit":
        os._exit(EXIT_CODE)
    if how == "term":
        os.kill(os.getpid(), signal.SIGTERM)
    if how == "request":
        request_stop(run.directory, reason="a test")


def draws() -> dict[str, Any]:
    return {"python": random.random(), "numpy": np.random.rand(), "torch": torch.rand(())}


class Training:
    """What the loop does with a batch, for all rows at once."""

    def __init__(self, rows: list[Row]) -> None:
        self.members = [Trained(row) for row in rows]
        self.window = 1 if rows[0]["accumulation"] == "1" else 4
        self.begins_anew = rows[0]["accumulation"] == "4 begun anew"
        self.counters = {"batches": 0, "gathered": 0}
        self.order: list[int] = []

    def parts(self) -> dict[str, Any]:
        found = {name: part for member in self.members for name, part in member.parts().items()}
        return {"counters": self.counters, "order": self.order, **found}

    def begin_epoch(self) -> None:
        if self.begins_anew:
            self.counters["gathered"] = 0
            for member in self.members:
                member.begin_anew()

    def take(self, batch: list[torch.Tensor]) -> dict[str, Any] | None:
        """Train on `batch`; return metrics if that completes a step."""
        self.order.extend(batch[-1].tolist())
        self.counters["batches"] += 1
        self.counters["gathered"] += 1
        for member in self.members:
            if self.window == 1:
                # Not after the step: whether gradients are there then is different for each window.
                member.zero_grad()
            member.gather(batch, 1 / self.window)
        return self._step(batch) if self.counters["gathered"] == self.window else None

    def _step(self, batch: list[torch.Tensor]) -> dict[str, Any]:
        metrics = draws()
        for member in self.members:
            metrics |= member.step(batch)
            if self.window != 1:
                member.zero_grad()
        self.counters["gathered"] = 0
        return metrics | {"order": zlib.crc32(repr(self.order).encode())}

    def held(self) -> dict[str, str]:
        found = {
            "counters": json.dumps(self.counters),
            "order": json.dumps(self.order),
            "draws": str(draws()),
        }
        return found | {name: digest for member in self.members for name, digest in member.held().items()}


def train(run_dir: Path, training: Training, how: str, stop_at: int) -> None:
    loader = DataLoader(Noisy(), batch_size=BATCH_SIZE, shuffle=True)
    # Some rows blow up in 16 bits, as they would without a stop: here all that counts is that bits are equal.
    with unbroken.Run(run_dir, save=[], non_finite=["*"], **training.parts()) as run:
        for _epoch in run.epochs(EPOCHS):
            training.begin_epoch()
            for batch in run.batches(loader):
                metrics = training.take(batch)
                if training.counters["batches"] == stop_at:
                    strike(how, run)
                if metrics is not None:
                    run.step(**metrics)
                if how in AT_ONCE and training.counters["batches"] == stop_at - SAVED_BEFORE:
                    run.save()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("rows", type=Path)
    parser.add_argument("--stop", default="never:-1")
    wanted = parser.parse_args()
    how, _, batch = wanted.stop.partition(":")
    clear_stop(wanted.run_dir)
    seed = os.getpid() if any(wanted.run_dir.glob("checkpoints/step-*")) else 7
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
    training = Training(json.loads(wanted.rows.read_text()))
    train(wanted.run_dir, training, how, int(batch))
    wanted.run_dir.with_suffix(".final.json").write_text(json.dumps(training.held()))


if __name__ == "__main__":
    main()
