"""Random operations inside functions: each keeps a state of its own, in a kernel that nobody can read."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

# No public name leads to the functions of the process.
from tensorflow.python.eager import context

# Those that draw from a state of their own. What is stateless, or has a generator, is not among them.
_STATEFUL = frozenset(
    {
        "AllCandidateSampler",
        "FixedUnigramCandidateSampler",
        "FractionalAvgPool",
        "FractionalMaxPool",
        "LearnedUnigramCandidateSampler",
        "LogUniformCandidateSampler",
        "Multinomial",
        "ParameterizedTruncatedNormal",
        "RandomGamma",
        "RandomPoisson",
        "RandomPoissonV2",
        "RandomShuffle",
        "RandomStandardNormal",
        "RandomUniform",
        "RandomUniformInt",
        "SampleDistortedBoundingBox",
        "SampleDistortedBoundingBoxV2",
        "ThreadUnsafeUnigramCandidateSampler",
        "TruncatedNormal",
        "UniformCandidateSampler",
    }
)
# What a function of the program is called inside, with a number at its end.
_FUNCTION = re.compile(r"__(?:inference|forward|backward)_(.+?)_\d+$")
# Functions of a dataset are the affair of who reads it.
_OF_DATASETS = "Dataset_"
_SHOWN = 3


class RandomOperations:
    """Notes the functions of the process that draw random numbers, as they come into use."""

    def __init__(self) -> None:
        self._seen: set[str] = set()
        # What functions draw, by their names: a function that is traced again has the same name.
        self._found: dict[str, set[str]] = {}

    @property
    def has_news(self) -> bool:
        # What comes into use later is told when the run stops or ends.
        return False

    def take_stepped(self) -> bool:
        """Return True: only the script knows when a step is complete."""
        return True

    def lost(self) -> list[tuple[str, bool]]:
        """Return a line for each function with such operations. A function may be called once only."""
        eager = context.context()
        # The list itself begins to work with devices, which is not for us to do.
        names = eager.list_function_names() if eager._context_handle is not None else ()
        for name in set(names) - self._seen:
            self._seen.add(name)
            if match := _FUNCTION.match(name):
                self._look(match[1], eager.get_function_def(name))
        return [(_text(function, operations), False) for function, operations in sorted(self._found.items())]

    def close(self) -> None:
        """Look no more."""

    def _look(self, function: str, definition: object) -> None:
        if function.startswith(_OF_DATASETS):
            return
        operations = set(_operations_in(definition, set()))
        if operations:
            self._found.setdefault(function, set()).update(operations)


def _operations_in(definition: Any, seen: set[str]) -> Iterator[str]:
    """Yield the operations that draw in a function, and in the bodies of its loops and branches."""
    for node in definition.node_def:
        if node.op in _STATEFUL:
            yield node.name
        for attribute in node.attr.values():
            for called in (attribute.func.name, *(each.name for each in attribute.list.func)):
                # Bodies are functions, too, with names of TensorFlow's; others are looked at by theirs.
                if called and called not in seen and not _FUNCTION.match(called):
                    seen.add(called)
                    yield from _operations_in(context.context().get_function_def(called), seen)


def _text(function: str, operations: set[str]) -> str:
    shown = sorted(operations)[:_SHOWN]
    more = f" and {len(operations) - _SHOWN} more" if len(operations) > _SHOWN else ""
    return (
        f"the random operations of the function {function}: {', '.join(shown)}{more}, which begin anew "
        "in a new process; draw from a tf.random.Generator that is a part, or use tf.random.stateless_*"
    )
