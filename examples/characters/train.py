"""A small transformer that learns, character by character, to write like Python's standard library.

python examples/characters/train.py --run-dir runs/characters
unbroken run -- python examples/characters/train.py
"""

import argparse
import random
import sysconfig
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import unbroken

LENGTH, WIDTH = 32, 64  # characters in a sample, numbers for each of them


class Transformer(nn.Module):
    def __init__(self, characters: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(characters, WIDTH)
        self.position = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.02)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, characters)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH))

    def forward(self, indices: Tensor) -> Tensor:
        hidden = self.embed(indices) + self.position
        return self.head(self.layers(hidden, mask=self.mask, is_causal=True))


def read_samples(size_bytes: int) -> tuple[Tensor, int]:
    """Return samples of LENGTH + 1 characters of the standard library, and how many kinds there are."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"".join(path.read_bytes() for path in files)[:size_bytes].decode(errors="replace")
    kinds = sorted(set(text))
    indices = torch.tensor([kinds.index(character) for character in text])
    return indices.unfold(0, LENGTH + 1, LENGTH).contiguous(), len(kinds)


def prediction_loss(model: nn.Module, samples: Tensor) -> Tensor:
    return cross_entropy(model(samples[:, :-1]).flatten(0, 1), samples[:, 1:].flatten())


def main() -> None:
    parser = argparse.ArgumentParser(description="Learn to write like the standard library.")
    parser.add_argument("--run-dir", help="where the run is kept; under `unbroken run` it says so itself")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--save-every", type=int, default=50, metavar="STEPS")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()

    torch.set_num_threads(1)  # The matrices are small: a second thread would only get in the way.
    for seed_generator in (random.seed, np.random.seed, torch.manual_seed):
        seed_generator(options.seed)
    samples, characters = read_samples(60_000)
    test, train = samples[::10], [sample for index, sample in enumerate(samples) if index % 10]

    loader = DataLoader(train, batch_size=16, shuffle=True)
    model = Transformer(characters)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=3e-3, total_steps=options.epochs * len(loader), pct_start=0.1
    )

    with unbroken.Run(
        options.run_dir,
        save=[unbroken.EverySteps(options.save_every)],
        config={"epochs": options.epochs, "seed": options.seed},
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
    ) as run:
        for epoch in run.epochs(options.epochs):
            model.train()
            for batch in run.batches(loader):
                loss = prediction_loss(model, batch)
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                run.step(loss=loss)
            model.eval()
            with torch.no_grad():
                test_loss = prediction_loss(model, test)
            run.record(test_loss=test_loss)
            print(f"epoch {epoch}: loss on unseen text {test_loss.item():.3f}")


if __name__ == "__main__":
    main()
