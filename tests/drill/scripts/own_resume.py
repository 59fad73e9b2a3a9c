"""A plain PyTorch training with a resume of its own, but for the leak that its first argument names.

    python own_resume.py LEAK [--resume PATH] [--every N]

It knows nothing of unbroken. A checkpoint is due after every N steps, in the middle of an epoch too, or at
the end of each epoch without N.
"""

from __future__ import annotations

import argparse
import os
import random

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS, SAMPLES, BATCH = 50, 24, 4


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("leak", nargs="?", default="none")
    parser.add_argument("--resume")
    parser.add_argument("--every", type=int, default=0)
    parser.add_argument("--link", default=".")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--compile", action="store_true")
    args = parser.parse_args()
    leak = args.leak
    torch.set_num_threads(1)
    torch.manual_seed(0)
    random.seed(0)
    points = torch.randn(SAMPLES, 4)
    labels = (points.sum(1) > 0).long()
    data = TensorDataset(points, labels)
    loader = DataLoader(data, batch_size=BATCH, shuffle=True, num_workers=args.workers)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda count: 0.97**count)
    first_epoch, done, seen, states = 0, 0, 0, {}
    # Followed by the compiler as any model, without the time that making kernels takes.
    call = torch.compile(model, backend="eager") if args.compile else None
    # A link, so that it leads out of a copy of this directory.
    out = "out"
    if args.link != "." and not os.path.exists(out):
        os.symlink(args.link, out)
    os.makedirs(out, exist_ok=True)

    def keep(epoch: int, batch: int) -> None:
        weights = model.state_dict()
        if leak == "rounded":
            weights = {
                name: item.half() if item.is_floating_point() else item for name, item in weights.items()
            }
        checkpoint = {
            "model": {
                name: item for name, item in weights.items() if leak != "buffers" or "running" not in name
            },
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
            "epoch": epoch,
            "batch": batch,
            "seen": seen,
            "begun": begun,
            "rng": torch.get_rng_state(),
        }
        target = f"{out}/new.pt" if leak != "torn" else "last.pt"
        torch.save(checkpoint, target)
        if leak != "torn":
            os.replace(target, "last.pt")

    def restore(path: str) -> None:
        nonlocal first_epoch, done, seen, states
        states = torch.load(path)
        model.load_state_dict(states["model"], strict=False)
        if leak != "moments":
            optimizer.load_state_dict(states["optimizer"])
        if leak != "scheduler":
            scheduler.load_state_dict(states["scheduler"])
        first_epoch, done = states["epoch"], states["batch"]
        if leak != "counter":
            seen = states["seen"]

    path = args.resume or ("last.pt" if leak == "finds" and os.path.exists("last.pt") else None)
    if path is not None and leak != "ignores":
        restore(path)
    for epoch in range(first_epoch, EPOCHS):
        if states and leak != "rng":
            torch.set_rng_state(states["begun"] if done else states["rng"])
        begun = torch.get_rng_state()
        for index, (inputs, targets) in enumerate(loader):
            if index < done and leak != "again":
                continue
            if states and done:
                torch.set_rng_state(states["rng"])
            states, done = {}, 0
            seen += 1
            loss = nn.functional.cross_entropy((call or model)(inputs), targets)
            if leak == "counter" and seen % 7 == 0:
                loss = 2 * loss
            loss.backward()
            if (index + 1) % args.accumulate:
                continue
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            if args.every and (epoch * len(loader) + index + 1) % args.every == 0:
                keep(epoch, index + 1)
        if states and done:
            # The last batch of the epoch was the one before the checkpoint.
            torch.set_rng_state(states["rng"])
        states, done = {}, 0
        model.eval()
        with torch.no_grad():
            model(points)
        model.train()
        if not args.every:
            keep(epoch + 1, 0)


if __name__ == "__main__":
    main()
