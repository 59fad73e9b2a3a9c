"""Trains a little, for long, as a user's script would, and looks out for a second one beside it.

`python disaster_script.py PLACE` under `unbroken run`. In PLACE lie: `alone`, locked as long as a trainer
or one of its data workers lives; `two-trainers`, made if another trainer began meanwhile; `hunger`, which
makes this process take memory until it is ended; `last-step`, the step after which training is done.
"""

from __future__ import annotations

import fcntl
import random
import sys
from pathlib import Path
from typing import TextIO

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import unbroken

PLACE = Path(sys.argv[1])


class Noisy(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((8,), float(index)) + torch.randn(8)


def be_alone() -> TextIO:
    lock = (PLACE / "alone").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        (PLACE / "two-trainers").touch()
        raise
    return lock


def be_hungry() -> None:
    (PLACE / "hunger").unlink()
    eaten = []
    while True:
        eaten.append(bytearray(b"x" * (32 << 20)))


def last_step() -> int:
    path = PLACE / "last-step"
    return int(path.read_text()) if path.exists() else sys.maxsize


def main() -> None:
    torch.set_num_threads(1)
    random.seed(11)
    np.random.seed(11)
    torch.manual_seed(11)
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(Noisy(), batch_size=4, shuffle=True, num_workers=2, persistent_workers=True)
    save, snapshot = [unbroken.EverySteps(20)], [unbroken.EverySteps(5)]
    with unbroken.Run(save=save, snapshot=snapshot, model=model, optimizer=optimizer) as run:
        lock = be_alone()
        for _ in run.epochs(1_000_000):
            for batch in run.batches(loader):
                loss = model(batch).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                run.step(loss=loss.detach())
                if (PLACE / "hunger").exists():
                    be_hungry()
                if run.step_count >= last_step():
                    lock.close()
                    return


if __name__ == "__main__":
    main()
