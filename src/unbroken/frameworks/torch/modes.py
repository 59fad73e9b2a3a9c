"""The modes of modules, train or eval: noted, and put back."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import nn


def mark_modes(values: Iterable[object]) -> Callable[[], None]:
    """Return a function that puts the modules among `values`, and those inside, into the modes of now."""
    modules = [value for value in values if isinstance(value, nn.Module)]
    then = [(inner, inner.training) for module in modules for inner in module.modules()]

    def put_back() -> None:
        # Each by itself: train() would set all that are inside, too.
        for module, is_training in then:
            module.training = is_training

    return put_back
