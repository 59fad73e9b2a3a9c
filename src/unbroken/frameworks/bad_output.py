"""What is said of numbers that are not finite, whatever framework they are of."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class BadOutput:
    """The first output that was not finite: of which module, and whether what it was made of was finite.

    `module` is the path as in "model.encoder.0", without what wrappers add.
    """

    module: str
    class_name: str
    are_inputs_finite: bool
    are_weights_finite: bool


def gradient_of(name: str) -> str:
    """Return what the gradient of the parameter `name` is called."""
    return f"the gradient of {name}"
