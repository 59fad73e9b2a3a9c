"""A small training script with every source of randomness, for twin runs in fresh processes.

    python script.py RUN_DIR --kill-at 7

Its seed differs in every process once the run exists: what is not restored shows in the losses.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import unbroken

torch.set_num_threads(1)


class Noisy(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        noise = torch.randn(6) + float(np.random.rand()) + random.random()
        return noise + index / 50, torch.tensor(index % 3)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("run_dir", nargs="?")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--persistent", action="store_true")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--save-every", type=int, default=3)
    parser.add_argument("--kill-at", type=int, default=-1)
    parser.add_argument("--term-at", type=int, default=-1)
    parser.add_argument("--raise-at", type=int, default=-1)
    parser.add_argument("--plan", default="", help="one disaster for each attempt: kill:5,term:9,raise:13")
    parser.add_argument("--width", type=int, default=8)
    parser.add_argument("--resume", default="auto")
    wanted = parser.parse_args()
    attempt = int(os.environ.get("UNBROKEN_ATTEMPT", "0"))
    plan = wanted.plan.split(",") if wanted.plan else []
    if 0 < attempt <= len(plan):
        disaster, _, at = plan[attempt - 1].partition(":")
        setattr(wanted, f"{disaster}_at", int(at))
    return wanted


def act(run: unbroken.Run, wanted: argparse.Namespace) -> None:
    """Called before `step`: the disaster strikes when the step of that number is done, not yet counted."""
    done = run.step_count + 1
    if done == wanted.kill_at:
        run._saver.wait()
        os.kill(os.getpid(), signal.SIGKILL)
    if done == wanted.term_at:
        os.kill(os.getpid(), signal.SIGTERM)
    if done == wanted.raise_at:
        raise RuntimeError("a bug of the user")


def main() -> None:
    wanted = options()
    run_dir = Path(wanted.run_dir or os.environ["UNBROKEN_RUN_DIR"])
    # A run that was killed before its first checkpoint begins anew, and must begin the same.
    seed = os.getpid() if any(run_dir.glob("checkpoints/step-*")) else 7
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
    model = nn.Sequential(
        nn.Linear(6, wanted.width),
        nn.BatchNorm1d(wanted.width),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Linear(wanted.width, 3),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=50_000)
    loader = DataLoader(
        Noisy(),
        batch_size=8,
        shuffle=True,
        num_workers=wanted.workers,
        persistent_workers=wanted.persistent,
    )
    validation = DataLoader(Noisy(), batch_size=25)
    counters = {"samples": 0}
    keep = [unbroken.KeepLast(3), unbroken.KeepBest(1, "accuracy")]
    with unbroken.Run(
        wanted.run_dir,
        save=[unbroken.EverySteps(wanted.save_every)],
        keep=keep,
        resume=wanted.resume,
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        counters=counters,
    ) as run:
        for _epoch in run.epochs(wanted.epochs):
            model.train()
            for inputs, labels in run.batches(loader):
                loss = nn.functional.cross_entropy(model(inputs), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                scheduler.step()
                counters["samples"] += len(labels)
                act(run, wanted)
                run.step(loss=loss, learning_rate=scheduler.get_last_lr()[0])
            model.eval()
            with torch.no_grad():
                right = sum(int((model(x).argmax(1) == y).sum()) for x, y in validation)
            run.record(accuracy=right / 50)
    print("samples", counters["samples"], file=sys.stderr)


if __name__ == "__main__":
    main()
