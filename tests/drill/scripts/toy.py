"""A deterministic training script, or one with planted leaks.

    python toy.py PLAN [--workers 2] [--leak generator] ...

PLAN is what a drill would name in the environment. The script names a run directory of its own, which must
never be touched when it is rehearsed.
"""

from __future__ import annotations

import argparse
import os
import random
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import unbroken

torch.set_num_threads(1)

NOISE = np.random.default_rng(5)


class Digits(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Twenty-four samples, augmented from three kinds of generators."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(3)

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        shift = float(self.rng.normal()) + random.random() + float(torch.rand(()))
        return torch.full((6,), index / 24) + shift, torch.tensor(index % 3)


class Curriculum:
    """Counts what training has seen, in the program only."""

    def __init__(self) -> None:
        self.seen = 0

    def weight(self) -> float:
        self.seen += 1
        return 1.0 / self.seen


class Everything:
    """Keeps the state of a trainer, all but that of its scheduler."""

    def __init__(self, **held: Any) -> None:
        self.held = held

    def state_dict(self) -> dict[str, Any]:
        return {name: item.state_dict() for name, item in self.held.items() if name != "scheduler"}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, item in state.items():
            self.held[name].load_state_dict(item)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("plan")
    parser.add_argument("--run-dir", default="user-run")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--leak", default="")
    parser.add_argument("--plain-evaluation", action="store_true")
    parser.add_argument("--width", type=int, default=8)
    wanted = parser.parse_args()
    os.environ["UNBROKEN_REHEARSAL"] = wanted.plan
    return wanted


def evaluate(model: nn.Module, validation: Any) -> float:
    model.eval()
    with torch.no_grad():
        found = [float(model(inputs).mean()) for inputs, _ in validation]
    model.train()
    return sum(found) / len(found)


def main() -> None:
    wanted = options()
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Linear(6, wanted.width), nn.BatchNorm1d(wanted.width), nn.Dropout(0.3), nn.Linear(wanted.width, 3)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
    loader = DataLoader(Digits(), batch_size=4, shuffle=True, num_workers=wanted.workers)
    validation = DataLoader(Digits(), batch_size=12)
    curriculum = Curriculum()
    patience = 1
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    if wanted.leak == "scheduler":
        parts = {"trainer": Everything(model=model, optimizer=optimizer, scheduler=scheduler)}
    with unbroken.Run(
        wanted.run_dir,
        save=[unbroken.EverySteps(1)],
        keep=[unbroken.KeepBest(1, "accuracy")],
        fresh=["optimizer"] if wanted.leak == "optimizer" else [],
        **parts,
    ) as run:
        for _epoch in run.epochs(4):
            for inputs, labels in run.batches(loader, name="train"):
                loss = nn.functional.cross_entropy(model(inputs), labels)
                if wanted.leak == "generator":
                    loss = loss * (1 + 0.1 * float(NOISE.random()))
                if wanted.leak == "counter":
                    loss = loss * curriculum.weight()
                if wanted.leak == "local":
                    patience += 1
                    loss = loss * patience
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                scheduler.step()
                run.step(loss=loss, rate=scheduler.get_last_lr()[0])
                run.save()
            held_out = validation if wanted.plain_evaluation else run.batches(validation, name="held-out")
            run.record(accuracy=evaluate(model, held_out))
    print("the script ended of itself")


main()
