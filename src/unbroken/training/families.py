"""Which frameworks this program uses. One that the user has not loaded is never imported."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from unbroken.state.choices import Choices
from unbroken.state.handlers import StateHandler
from unbroken.state.python import python_handlers
from unbroken.state.tree import LeafCodec
from unbroken.training.randomness import GlobalRandomnessHandler


def codecs(*, describes: bool = False) -> list[LeafCodec]:
    """Return the codecs of the loaded frameworks.

    With `describes` the tensors they load may have a dtype and a shape only, to be compared by.
    """
    found: list[LeafCodec] = []
    if "numpy" in sys.modules:
        from unbroken.frameworks.numpy import NumpyCodec

        found.append(NumpyCodec())
    if "torch" in sys.modules:
        from unbroken.frameworks.torch import family

        found.append(family.codec(describes=describes))
    return found


def handlers(parts: Mapping[str, object], choices: Choices) -> list[StateHandler]:
    """Return the handlers for objects of the loaded frameworks and of plain Python, as they are asked."""
    found: list[StateHandler] = [GlobalRandomnessHandler()]
    if "torch" in sys.modules:
        from unbroken.frameworks.torch import family

        found += family.handlers(parts, choices)
    if "numpy" in sys.modules:
        from unbroken.frameworks.numpy import ArrayHandler

        found.append(ArrayHandler())
    from unbroken.frameworks.generator_part import GeneratorHandler

    return [*found, GeneratorHandler(), *python_handlers(codecs())]


def mark_gradients(parts: Mapping[str, object]) -> Callable[[], bool]:
    """Return a function that tells whether gradients of `parts` have changed since now."""
    if "torch" in sys.modules:
        from unbroken.frameworks.torch import family

        return family.mark_gradients(parts.values())
    return lambda: False


def resumable_loader(loader: object) -> Any:
    """Return `loader` made resumable by its framework, or None if it is of none."""
    if "torch" in sys.modules:
        from unbroken.frameworks.torch import family

        return family.resumable_loader(loader)
    return None
