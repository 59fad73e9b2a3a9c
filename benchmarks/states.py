"""The training states that are saved and loaded, by their shapes. Pure: no framework is imported."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

QUICK_DIVISOR = 50
STATES = ("gpt", "small", "adapter")


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSpec:
    """The shapes of a model by parameter name; those in `frozen` are not trained. All float32."""

    shapes: dict[str, tuple[int, ...]]
    frozen: frozenset[str] = frozenset()

    @property
    def trained(self) -> dict[str, tuple[int, ...]]:
        return {name: shape for name, shape in self.shapes.items() if name not in self.frozen}

    def tensors(self) -> list[tuple[int, ...]]:
        """Return the shapes of all tensors: parameters, then two moments and a step for each trained one."""
        trained = list(self.trained.values())
        return [*self.shapes.values(), *trained, *trained, *[()] * len(trained)]

    @property
    def size_bytes(self) -> int:
        return 4 * sum(math.prod(shape) for shape in self.tensors())


class State(Protocol):
    """What a measurement does with a state between the saves and loads."""

    size_bytes: int
    tensor_count: int

    def train(self) -> None:
        """Change every trained tensor and its moments, as an optimizer step does."""

    def clear(self) -> None:
        """Set every tensor to zero, so that a load has something to do."""

    def fingerprint(self) -> int:
        """Return a number that tells whether all tensors hold the right bits in the right places."""


def spec_of(kind: str, *, is_quick: bool) -> StateSpec:
    """Return the state `kind`, about fifty times smaller for a quick run."""
    divisor = QUICK_DIVISOR if is_quick else 1
    if kind == "gpt":
        return _gpt(width=128, vocabulary=4096, context=512) if is_quick else _gpt()
    if kind == "small":
        # With their moments 2,400 tensors of 2 to 16 KB, and 800 steps.
        sizes = [(512 + (index * 977) % 3584,) for index in range(800 // divisor)]
        return StateSpec(shapes={f"layer.{index}.weight": size for index, size in enumerate(sizes)})
    if kind == "adapter":
        # 1.05 GB frozen, 10 MB trained and 20 MB of moments.
        count = 200 // divisor
        base = {f"base.{index}.weight": (1280, 1024) for index in range(count)}
        adapter = {f"adapter.{index}.weight": (1280, 10) for index in range(count)}
        return StateSpec(shapes={**base, **adapter}, frozen=frozenset(base))
    raise ValueError(f"state: expected one of {', '.join(STATES)}, found {kind!r}")


def tiny() -> StateSpec:
    """A state that costs nothing: it makes a library load what it loads on first use."""
    return StateSpec(shapes={"first.weight": (8, 8), "second.weight": (8,)})


def many(count: int) -> StateSpec:
    """`count` parameters of 1 KB each."""
    return StateSpec(shapes={f"layer.{index}.weight": (256,) for index in range(count)})


def fingerprint(sums: Iterable[int]) -> int:
    """Combine the sums of the words of each tensor; also tells when two tensors changed places."""
    combined = 0
    for total in sums:
        combined = (combined * 1_000_003 + total) % (1 << 61)
    return combined


def _gpt(*, layers: int = 12, width: int = 768, vocabulary: int = 50257, context: int = 1024) -> StateSpec:
    """GPT-2 with 124M parameters; with AdamW 592 tensors of 1.49 GB in all."""
    shapes: dict[str, tuple[int, ...]] = {
        "embedding.tokens.weight": (vocabulary, width),
        "embedding.positions.weight": (context, width),
    }
    for layer in range(layers):
        parts = {
            "norm_1.weight": (width,),
            "norm_1.bias": (width,),
            "attention.input.weight": (3 * width, width),
            "attention.input.bias": (3 * width,),
            "attention.output.weight": (width, width),
            "attention.output.bias": (width,),
            "norm_2.weight": (width,),
            "norm_2.bias": (width,),
            "mlp.input.weight": (4 * width, width),
            "mlp.input.bias": (4 * width,),
            "mlp.output.weight": (width, 4 * width),
            "mlp.output.bias": (width,),
        }
        shapes.update({f"blocks.{layer}.{name}": shape for name, shape in parts.items()})
    shapes["norm.weight"] = shapes["norm.bias"] = (width,)
    return StateSpec(shapes=shapes)
