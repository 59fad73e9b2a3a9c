"""Loss curves of trainings that are well: as noisy, and with such bumps, as they are in life."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

Curve = Callable[[random.Random, int], float]


def falling(step: int, scale: float = 300.0, start: float = 2.3, end: float = 0.1) -> float:
    return end + (start - end) * math.exp(-step / scale)


def power(step: int) -> float:
    return 0.3 + 8 * (step + 1) ** -0.35


def wrong_answers(rng: random.Random, step: int, batch_size: int = 8) -> float:
    share = 0.02 + 0.3 * math.exp(-step / 300)
    return sum(rng.random() < share for _ in range(batch_size))


def triplet(rng: random.Random, step: int) -> float:
    """A loss with a margin: exactly zero where it is kept."""
    margin = -0.6 * (1 - math.exp(-step / 300))
    return sum(max(0.0, margin + rng.gauss(0, 0.25)) for _ in range(4)) / 4


def task(rng: random.Random) -> float:
    return rng.choice([0.02, 0.3, 5.0]) * near(rng, 0.1)


def near(rng: random.Random, share: float) -> float:
    """A factor around 1."""
    return 1 + rng.gauss(0, share)


def skewed(rng: random.Random, sigma: float) -> float:
    """A factor with a heavy tail."""
    return math.exp(rng.gauss(0, sigma))


# What batches of an ordinary size give: a 10x spike stands out of it at once.
CALM: dict[str, Curve] = {
    "exponential": lambda rng, step: falling(step) * near(rng, 0.05),
    "steep": lambda rng, step: falling(step, 50, end=0.02) * near(rng, 0.1),
    "power law": lambda rng, step: power(step) * near(rng, 0.03),
    "plateau with noise": lambda rng, step: 0.69 + rng.gauss(0, 0.05),
    "epoch borders": lambda rng, step: falling(step) * 0.6 ** min(4, step // 400) * near(rng, 0.06),
    "rises at epoch borders": lambda rng, step: (
        falling(step) * (1 + 0.3 * (step % 200 < 10)) * near(rng, 0.06)
    ),
    "bump of the warm-up": lambda rng, step: (
        (2.3 + 2.5 * math.exp(-(((step - 100) / 40) ** 2))) * math.exp(-step / 800) * near(rng, 0.05)
    ),
    "early bump": lambda rng, step: (
        (falling(step) + 3 * math.exp(-(((step - 20) / 8) ** 2))) * near(rng, 0.05)
    ),
    "cyclic rate": lambda rng, step: (
        (0.3 + 0.3 * falling(step) + 0.2 * (1 - abs(step % 400 / 200 - 1))) * near(rng, 0.1)
    ),
    "rate decayed in steps": lambda rng, step: (1, 0.1, 0.02)[min(2, step // 500)] * near(rng, 0.1),
    "negative": lambda rng, step: -5 + 4 * math.exp(-step / 300) + rng.gauss(0, 0.3),
    "two players": lambda rng, step: 0.7 + 0.2 * math.sin(step / 60) + rng.gauss(0, 0.1),
}

# Where single batches stand out by themselves, or ten times the loss is nothing.
WILD: dict[str, Curve] = {
    "through zero": lambda rng, step: -2 + 4 * math.exp(-step / 300) + rng.gauss(0, 0.2),
    "heavy tails": lambda rng, step: falling(step) * skewed(rng, 0.6),
    "very heavy tails": lambda rng, step: falling(step) * (1 + rng.paretovariate(3)),
    "small batches": lambda rng, step: falling(step) * sum(rng.expovariate(1) for _ in range(4)) / 4,
    "a short last batch": lambda rng, step: (
        falling(step) * (skewed(rng, 0.7) if step % 45 == 44 else near(rng, 0.1))
    ),
    "wrong labels": lambda rng, step: (
        falling(step, 200, end=0.01) * skewed(rng, 0.5) + 0.3 * (rng.random() < 0.05)
    ),
    "down to nothing": lambda rng, step: falling(step, 100, end=0) * skewed(rng, 0.5),
    "two kinds of batches": lambda rng, step: (4, 1)[step % 2] * falling(step) * near(rng, 0.05),
    "each tenth is hard": lambda rng, step: (6 if step % 10 == 7 else 1) * falling(step) * near(rng, 0.05),
    "policy around zero": lambda rng, step: rng.gauss(0, 0.05) * skewed(rng, 0.8),
    "wrong answers of eight": wrong_answers,
    "triplets": triplet,
    "one of three tasks": lambda rng, step: task(rng),
    "two of three tasks": lambda rng, step: task(rng) + task(rng),
    "one sample of a diffusion": lambda rng, step: 0.02 + 0.5 * rng.random() ** 6 + math.exp(-step / 200),
    "values of a critic": lambda rng, step: (1 + step / 1500) * skewed(rng, 0.4),
}


def curve(shape: Curve, seed: int, steps: int) -> list[float]:
    rng = random.Random(seed)
    return [shape(rng, step) for step in range(steps)]
