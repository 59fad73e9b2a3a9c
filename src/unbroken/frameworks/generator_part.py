"""A random generator that is a part of its own."""

from __future__ import annotations

from typing import Any

from unbroken.frameworks.generators import generator_state, is_generator, set_generator_state
from unbroken.state.handlers import ORDER_GENERATOR, Difference


class GeneratorHandler:
    """`random.Random`, NumPy's generators and `torch.Generator`, set in place."""

    name = "generator"
    order = ORDER_GENERATOR

    def accepts(self, value: object) -> bool:
        return is_generator(value)

    def state(self, value: Any) -> object:
        return generator_state(value)

    def differences(self, value: Any, state: Any) -> list[Difference]:
        mine, theirs = generator_state(value)["kind"], state["kind"]
        if mine == theirs:
            return []
        return [Difference("other", "", f"a {mine}, the checkpoint has a {theirs}")]

    def restore(self, value: Any, state: Any) -> None:
        set_generator_state(value, state)
