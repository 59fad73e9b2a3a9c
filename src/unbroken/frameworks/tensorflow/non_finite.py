"""Which variables are not finite, to say so when a step was bad."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from unbroken.frameworks.finite import count_non_finite
from unbroken.frameworks.tensorflow.content import content_of, is_open
from unbroken.frameworks.tensorflow.distributed import is_variable
from unbroken.frameworks.tensorflow.tensors import TfTensor
from unbroken.state.tensors import FLOATING, bytes_of


def bad_tensors(parts: Mapping[str, object]) -> list[str]:
    """Return the names of trained variables that are not finite; others may be -inf in places."""
    # TensorFlow keeps no gradients once they are applied: there are none to look at.
    return [name for name, variable in _variables(parts) if _is_bad(TfTensor(variable))]


def _variables(parts: Mapping[str, object]) -> Iterator[tuple[str, Any]]:
    for part, value in parts.items():
        if is_variable(value):
            yield part, value
        elif is_open(value):
            yield from (
                (f"{part}.{name}", variable) for name, variable in content_of(value).variables.items()
            )


def _is_bad(source: TfTensor) -> bool:
    return (
        source.is_trained
        and source.dtype in FLOATING
        and count_non_finite(bytes_of(source), source.dtype) > 0
    )
