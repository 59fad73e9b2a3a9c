"""A run over streams in workers, for twin runs in fresh processes; killed while workers read ahead."""

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
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).parents[2]))

import unbroken
from tests.frameworks.stream_scenarios import Plain, WithState

torch.set_num_threads(1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--kill-at", type=int, default=-1)
    parser.add_argument("--with-state", action="store_true")
    parser.add_argument("--persistent", action="store_true")
    wanted = parser.parse_args()
    seed = os.getpid() if any(wanted.run_dir.glob("checkpoints/step-*")) else 7
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.2), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    loader = DataLoader(
        WithState() if wanted.with_state else Plain(),
        batch_size=4,
        num_workers=2,
        persistent_workers=wanted.persistent,
    )
    save = [unbroken.EverySteps(2)]
    with unbroken.Run(wanted.run_dir, save=save, model=model, optimizer=optimizer) as run:
        for _epoch in run.epochs(3):
            for inputs, indices in run.batches(loader):
                optimizer.zero_grad()
                loss = (model(inputs.float()) ** 2).mean()
                loss.backward()
                optimizer.step()
                if run.step_count + 1 == wanted.kill_at:
                    run._saver.wait()
                    os.kill(os.getpid(), signal.SIGKILL)
                places = {f"index{place}": int(index) for place, index in enumerate(indices)}
                run.step(loss=loss, **places)


if __name__ == "__main__":
    main()
