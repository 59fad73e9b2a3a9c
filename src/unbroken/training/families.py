"""Which frameworks this program uses. One that the user has not loaded is never imported."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from unbroken.errors import UsageError
from unbroken.frameworks.generators import is_generator
from unbroken.state.choices import Choices
from unbroken.state.handlers import StateHandler
from unbroken.state.python import python_handlers
from unbroken.state.tensors import LoadedTensor
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
    elif choices.non_persistent:
        raise UsageError(
            f"Run: expected modules for non_persistent={list(choices.non_persistent)}, found none",
            hint="leave it out",
        )
    if "numpy" in sys.modules:
        from unbroken.frameworks.numpy import ArrayHandler

        found.append(ArrayHandler())
    from unbroken.frameworks.generator_part import GeneratorHandler

    return [*found, GeneratorHandler(), *python_handlers(codecs(), is_elsewhere=is_generator)]


def watch(parts: Mapping[str, object]) -> Any:
    """Begin to look at what trains `parts` and return who looks, or None if no framework is loaded."""
    if "torch" in sys.modules:
        from unbroken.frameworks.torch.at_work import AtWork

        return AtWork(parts)
    return None


def mark_gradients(parts: Mapping[str, object]) -> Callable[[], bool]:
    """Return a function that tells whether gradients of `parts` have changed since now."""
    if "torch" in sys.modules:
        from unbroken.frameworks.torch.gathering import mark_gradients

        return mark_gradients(parts.values())
    return lambda: False


def mark_modes(parts: Mapping[str, object]) -> Callable[[], None]:
    """Return a function that puts the modules of `parts` back into the modes, train or eval, of now."""
    if "torch" in sys.modules:
        from unbroken.frameworks.torch.modes import mark_modes

        return mark_modes(parts.values())
    return lambda: None


def drop_gradients(values: Iterable[object]) -> None:
    """Let go of the gradients of what `values` are or train."""
    if "torch" in sys.modules:
        from unbroken.frameworks.torch.gathering import drop_gradients

        drop_gradients(values)


class LowerRates(Protocol):
    """Keeps learning rates lower until it is closed."""

    def close(self) -> None:
        """Lower no more."""


def lower_rates(
    parts: Mapping[str, object], factor: Callable[[], float]
) -> tuple[LowerRates | None, list[str]]:
    """Multiply the rates of the optimizers among `parts` by `factor()` as they step; see `LowerRates`.

    Also return the names of the parts that look like optimizers and whose rates cannot be lowered.
    """
    if "torch" in sys.modules:
        from unbroken.frameworks.torch import lower_rate, rates

        found = [optimizer for _, optimizer in rates.optimizers_of(parts)]
        return lower_rate.LowerRates(found, factor) if found else None, rates.unknown_optimizers(parts)
    return None, []


def highest_rate(parts: Mapping[str, object]) -> Callable[[], float | None]:
    """Return a function that tells the highest learning rate among `parts` of now, None if nobody knows."""
    if "torch" in sys.modules:
        from unbroken.frameworks.torch.rates import HighestRate

        return HighestRate(parts)
    return lambda: None


def has_scaler(parts: Mapping[str, object]) -> bool:
    """Tell whether a gradient scaler is among `parts`, which leaves out steps whose gradients overflow."""
    if "torch" in sys.modules:
        from unbroken.frameworks.torch.rates import has_scaler

        return has_scaler(parts)
    return False


def ranks() -> Any:
    """Return the ranks that train together, to ask each other in each step, or None if there is one alone."""
    if "torch" in sys.modules:
        from unbroken.frameworks.torch.collective import ranks

        return ranks()
    return None


def weights(model: object) -> Any:
    """Return the weights of a model of a framework, to be compared and filled; None if it is none."""
    if "torch" in sys.modules:
        from unbroken.frameworks.torch import family

        return family.weights(model)
    return None


def as_weights(tensors: Mapping[str, LoadedTensor]) -> dict[str, Any]:
    """Return tensors of a framework by their names, for `weights` to be filled with."""
    from unbroken.frameworks.torch import weights as torch_weights

    return {name: torch_weights.made_of(tensor) for name, tensor in tensors.items()}


def read_torch_file(path: Path) -> dict[str, Any]:
    """Return the tensors in a file of torch.save by their names there."""
    from unbroken.frameworks.torch import weights as torch_weights

    return torch_weights.read_torch_file(path)


def without_wrappers(tensors: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield `tensors` under their names, then without what wrappers have added to these, little by little."""
    from unbroken.frameworks.torch import weights as torch_weights

    yield from torch_weights.without_wrappers(tensors)


def resumable_loader(loader: object) -> Any:
    """Return `loader` made resumable by its framework, or None if it is of none."""
    if "torch" in sys.modules:
        from unbroken.frameworks.torch import family

        return family.resumable_loader(loader)
    return None


def keyed_loader(loader: object, name: str) -> Any:
    """Return `loader` with keyed randomness by its framework, or None if none has that for it."""
    if "torch" in sys.modules:
        from unbroken.frameworks.torch import family

        return family.keyed_loader(loader, name)
    return None


def step_watch(
    parts: Mapping[str, object], usual: Collection[str], before: Any = None, *, runs_eagerly: bool = True
) -> Any:
    """Return what looks, as a step is done in its block, for what is not finite and should be, or None."""
    if "torch" in sys.modules:
        from unbroken.frameworks.torch.first_non_finite import StepWatch

        return StepWatch(parts, usual, before, runs_eagerly=runs_eagerly)
    return None


def bad_tensors(parts: Mapping[str, object]) -> list[str]:
    """Return the names of the tensors in models, and of their gradients, that are not finite."""
    if "torch" in sys.modules:
        from unbroken.frameworks.torch import first_non_finite

        return first_non_finite.bad_tensors(parts)
    return []


def bad_rows(batch: object, size: int) -> list[int]:
    """Return the places in `batch` of those of its `size` samples whose numbers are not finite."""
    if "torch" in sys.modules:
        from unbroken.frameworks.torch import first_non_finite

        return first_non_finite.bad_rows(batch, size)
    return []


def may_vary() -> bool:
    """Tell whether kernels may be in use whose results are not the same each time."""
    if "torch" in sys.modules:
        from unbroken.frameworks.torch import first_non_finite

        return first_non_finite.may_vary()
    return False
