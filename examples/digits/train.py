"""Handwritten digits: a small convolutional network that no interruption can change.

python examples/digits/train.py --run-dir runs/digits
unbroken run -- python examples/digits/train.py
"""

import argparse
import random

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

import unbroken


class ShiftedDigits(Dataset):
    """Images of 8 x 8 pixels, shifted and made noisy in a new way each time they are read."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        shift = torch.randint(-1, 2, (2,)).tolist()
        noise = np.random.normal(0.0, 0.1, (1, 8, 8)).astype(np.float32)
        return self.images[index].roll(shift, dims=(1, 2)) + torch.from_numpy(noise), self.labels[index]


def build_model() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Dropout(0.2), nn.Linear(128, 10)),
    )


def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    model.eval()
    with torch.no_grad():
        return (model(images).argmax(1) == labels).float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on handwritten digits.")
    parser.add_argument("--run-dir", help="where the run is kept; under `unbroken run` it says so itself")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--save-every", type=int, default=50, metavar="STEPS")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()

    torch.set_num_threads(1)  # The images are small: a second thread would only get in the way.
    for seed_generator in (random.seed, np.random.seed, torch.manual_seed):
        seed_generator(options.seed)
    pixels, classes = load_digits(return_X_y=True)
    images, labels = torch.tensor(pixels / 16, dtype=torch.float32).view(-1, 1, 8, 8), torch.tensor(classes)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    test, train = order[:360], order[360:]

    digits = ShiftedDigits(images[train], labels[train])
    loader = DataLoader(digits, batch_size=32, shuffle=True, num_workers=2)
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=options.epochs * len(loader))

    with unbroken.Run(
        options.run_dir,
        save=[unbroken.EverySteps(options.save_every)],
        keep=[unbroken.KeepLast(3), unbroken.KeepBest(1, "accuracy")],
        config={"epochs": options.epochs, "seed": options.seed},
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
    ) as run:
        for epoch in run.epochs(options.epochs):
            model.train()
            for batch, targets in run.batches(loader):
                loss = cross_entropy(model(batch), targets)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                scheduler.step()
                run.step(loss=loss)
            score = accuracy(model, images[test], labels[test])
            run.record(accuracy=score)
            print(f"epoch {epoch}: accuracy {score:.3f}")


if __name__ == "__main__":
    main()
