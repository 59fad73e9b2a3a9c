"""Handwritten digits, some of them from a broken file: the run gets past the loss spike by itself.

python examples/spike/train.py --run-dir runs/spike
unbroken run -- python examples/spike/train.py
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import unbroken

BROKEN = range(900, 908)  # These images are ten thousand times too bright, as from a file that is broken.


def build_model() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Dropout(0.2), nn.Linear(128, 10)),
    )


def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    model.eval()
    with torch.no_grad():
        return (model(images).argmax(1) == labels).float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on handwritten digits, of which some are broken.")
    parser.add_argument("--run-dir", help="where the run is kept; under `unbroken run` it says so itself")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--save-every", type=int, default=10, metavar="STEPS")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--health", choices=["roll-back", "warn", "off"], default="roll-back")
    options = parser.parse_args()

    torch.set_num_threads(1)  # The images are small: a second thread would only get in the way.
    torch.manual_seed(options.seed)
    pixels, classes = load_digits(return_X_y=True)
    images, labels = torch.tensor(pixels / 16, dtype=torch.float32).view(-1, 1, 8, 8), torch.tensor(classes)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    test, train = order[:360], order[360:]
    images[train[BROKEN]] *= 1e4

    loader = DataLoader(TensorDataset(images[train], labels[train]), batch_size=32)
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def train_step(batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, targets = batch
        loss = cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    with unbroken.Run(
        options.run_dir,
        save=[unbroken.EverySteps(options.save_every)],
        health=unbroken.Health(action=options.health, warm_up_steps=20, replay=train_step),
        config={"epochs": options.epochs, "seed": options.seed},
        model=model,
        optimizer=optimizer,
    ) as run:
        for epoch in run.epochs(options.epochs):
            model.train()
            for batch in run.batches(loader):
                run.step(loss=train_step(batch))
            score = accuracy(model, images[test], labels[test])
            run.record(accuracy=score)
            print(f"epoch {epoch}: accuracy {score:.3f}")


if __name__ == "__main__":
    main()
