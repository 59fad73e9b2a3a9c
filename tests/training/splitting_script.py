"""Trains on batches that it can split, in a memory that takes only so many samples at once.

    python splitting_script.py RUN_DIR --fits 3

What it raises is torch's own error, which a device raises; here it is raised by the script.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import unbroken

torch.set_num_threads(1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run_dir", nargs="?")
    parser.add_argument("--fits", type=int, required=True)
    parser.add_argument("--later", type=int, default=0, help="before this step 4 samples fit as well")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=2)
    wanted = parser.parse_args()
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(
        TensorDataset(torch.randn(46, 6), torch.arange(46) % 3), batch_size=wanted.batch, shuffle=True
    )
    with unbroken.Run(wanted.run_dir, save=[unbroken.EverySteps(3)], model=model, optimizer=optimizer) as run:
        for _epoch in run.epochs(wanted.epochs):
            for batch in run.batches(loader):
                optimizer.zero_grad()
                for (inputs, labels), share in run.micro_batches(batch):
                    fits = max(4, wanted.fits) if run.step_count + 1 < wanted.later else wanted.fits
                    if len(inputs) > fits:
                        raise torch.OutOfMemoryError(
                            "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity "
                            "of 39.39 GiB of which 1.10 GiB is free."
                        )
                    (nn.functional.cross_entropy(model(inputs), labels) * share).backward()
                optimizer.step()
                run.step()


if __name__ == "__main__":
    main()
