"""Which frameworks this program uses. One that the user has not loaded is never imported."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from unbroken.errors import UsageError
from unbroken.frameworks.family import Family, LowerRates, Watch
from unbroken.frameworks.generators import is_generator
from unbroken.state.choices import Choices
from unbroken.state.handlers import StateHandler
from unbroken.state.python import python_handlers
from unbroken.state.tree import LeafCodec
from unbroken.training.randomness import GlobalRandomnessHandler

# As they are asked. A model of Keras may be one of the framework below it, too.
_FAMILIES = ("keras", "tensorflow", "torch")


def _loaded() -> Iterator[Family]:
    for name in _FAMILIES:
        if name in sys.modules:
            found: Family = import_module(f"unbroken.frameworks.{name}.family").FAMILY
            yield found


def codecs(*, describes: bool = False) -> list[LeafCodec]:
    """Return the codecs of the loaded frameworks.

    With `describes` the tensors they load may have a dtype and a shape only, to be compared by.
    """
    found: list[LeafCodec] = []
    if "numpy" in sys.modules:
        from unbroken.frameworks.numpy import NumpyCodec

        found.append(NumpyCodec())
    return found + [codec for family in _loaded() for codec in family.codecs(describes=describes)]


def handlers(parts: Mapping[str, object], choices: Choices) -> list[StateHandler]:
    """Return the handlers for objects of the loaded frameworks and of plain Python, as they are asked."""
    if choices.non_persistent and "torch" not in sys.modules:
        raise UsageError(
            f"Run: expected modules for non_persistent={list(choices.non_persistent)}, found none",
            hint="leave it out",
        )
    found: list[StateHandler] = [GlobalRandomnessHandler()]
    for family in _loaded():
        found += family.handlers(parts, choices)
    if "numpy" in sys.modules:
        from unbroken.frameworks.numpy import ArrayHandler

        found.append(ArrayHandler())
    from unbroken.frameworks.generator_part import GeneratorHandler

    return [*found, GeneratorHandler(), *python_handlers(codecs(), is_elsewhere=is_generator)]


def own_parts(parts: Mapping[str, object], choices: Choices) -> dict[str, object]:
    """Return the parts that a run with `parts` has by itself, by name."""
    return {name: own for family in _loaded() for name, own in family.own_parts(parts, choices).items()}


def environment() -> dict[str, object]:
    """Return what of the loaded frameworks decides the bits of a result."""
    return {name: value for family in _loaded() for name, value in family.environment().items()}


def watch(parts: Mapping[str, object]) -> Watch | None:
    """Begin to look at what trains `parts` and return who looks, or None if no framework does."""
    found = [looks for family in _loaded() if (looks := family.watch(parts)) is not None]
    return _Watches(found) if len(found) > 1 else next(iter(found), None)


class _Watches:
    """Those of several frameworks as one."""

    def __init__(self, watches: list[Watch]) -> None:
        self._watches = watches

    @property
    def has_news(self) -> bool:
        return any(watch.has_news for watch in self._watches)

    def take_stepped(self) -> bool:
        # Each is asked: it forgets what it has told. One that cannot know leaves it to the others.
        stepped = [watch.take_stepped() for watch in self._watches]
        return all(stepped)

    def lost(self) -> list[tuple[str, bool]]:
        return [found for watch in self._watches for found in watch.lost()]

    def close(self) -> None:
        for watch in self._watches:
            watch.close()


def mark_gradients(parts: Mapping[str, object]) -> Callable[[], bool]:
    """Return a function that tells whether gradients of `parts` have changed since now."""
    marks = [mark for family in _loaded() if (mark := family.mark_gradients(parts)) is not None]
    return lambda: any(has_changed() for has_changed in marks)


def mark_modes(parts: Mapping[str, object]) -> Callable[[], None]:
    """Return a function that puts the modules of `parts` back into the modes, train or eval, of now."""
    marks = [mark for family in _loaded() if (mark := family.mark_modes(parts)) is not None]

    def put_back() -> None:
        for mark in marks:
            mark()

    return put_back


def drop_gradients(values: Iterable[object]) -> None:
    """Let go of the gradients of what `values` are or train."""
    everything = list(values)
    for family in _loaded():
        family.drop_gradients(everything)


def lower_rates(
    parts: Mapping[str, object], factor: Callable[[], float]
) -> tuple[list[LowerRates], list[str]]:
    """Multiply the rates of the optimizers among `parts` by `factor()` as they step; see `LowerRates`.

    Also return the names of the parts that look like optimizers and whose rates cannot be lowered.
    """
    found = [family.lower_rates(parts, factor) for family in _loaded()]
    lowered = [rates for rates, _ in found if rates is not None]
    return lowered, [name for _, unknown in found for name in unknown]


def highest_rate(parts: Mapping[str, object]) -> Callable[[], float | None]:
    """Return a function that tells the highest learning rate among `parts` of now, None if nobody knows."""
    rates = [rate for family in _loaded() if (rate := family.highest_rate(parts)) is not None]
    if len(rates) == 1:
        return rates[0]
    return lambda: max((rate for of in rates if (rate := of()) is not None), default=None)


def has_scaler(parts: Mapping[str, object]) -> bool:
    """Tell whether a gradient scaler is among `parts`, which leaves out steps whose gradients overflow."""
    return any(family.has_scaler(parts) for family in _loaded())


def check_processes() -> None:
    """Raise UsageError where this process trains together with others and cannot have a run."""
    for family in _loaded():
        family.check_processes()


def ranks() -> Any:
    """Return the ranks that train together, to ask each other in each step, or None if there is one alone."""
    return next((found for family in _loaded() if (found := family.ranks()) is not None), None)


def weights(model: object) -> Any:
    """Return the weights of a model of a framework, to be compared and filled; None if it is none."""
    return next((found for family in _loaded() if (found := family.weights(model)) is not None), None)


def read_torch_file(path: Path) -> dict[str, Any]:
    """Return the tensors in a file of torch.save by their names there.

    Raises UsageError where torch is not in use.
    """
    if "torch" not in sys.modules:
        raise UsageError(
            f"{path}: expected weights for a model of another framework, found a file of torch.save",
            hint="convert it to safetensors, or import torch where the model is one of torch",
        )
    from unbroken.frameworks.torch import weights as torch_weights

    return torch_weights.read_torch_file(path)


def without_wrappers(tensors: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield `tensors` under their names, then without what wrappers have added to these, little by little."""
    if "torch" not in sys.modules:
        yield dict(tensors)
        return
    from unbroken.frameworks.torch import weights as torch_weights

    yield from torch_weights.without_wrappers(tensors)


def begin_from(
    source: Path, parts: Mapping[str, object], new_name: Callable[[str], str], choices: Choices
) -> Any:
    """Return what a checkpoint of a framework's own holds for `parts`, None if no framework reads it."""
    starts = (family.begin_from(source, parts, new_name, choices) for family in _loaded())
    return next((found for found in starts if found is not None), None)


def resumable_loader(loader: object) -> Any:
    """Return `loader` made resumable by its framework, or None if it is of none."""
    return next((made for family in _loaded() if (made := family.resumable_loader(loader)) is not None), None)


def keyed_loader(loader: object, name: str) -> Any:
    """Return `loader` with keyed randomness by its framework, or None if none has that for it."""
    return next(
        (made for family in _loaded() if (made := family.keyed_loader(loader, name)) is not None), None
    )


def step_watch(
    parts: Mapping[str, object], usual: Collection[str], before: Any = None, *, runs_eagerly: bool = True
) -> Any:
    """Return what looks, as a step is done in its block, for what is not finite and should be, or None."""
    watches = (family.step_watch(parts, usual, before, runs_eagerly=runs_eagerly) for family in _loaded())
    return next((watch for watch in watches if watch is not None), None)


def bad_tensors(parts: Mapping[str, object]) -> list[str]:
    """Return the names of the tensors in models, and of their gradients, that are not finite."""
    return [name for family in _loaded() for name in family.bad_tensors(parts)]


def bad_rows(batch: object, size: int) -> list[int]:
    """Return the places in `batch` of those of its `size` samples whose numbers are not finite."""
    return sorted({row for family in _loaded() for row in family.bad_rows(batch, size)})


def may_vary() -> bool:
    """Tell whether kernels may be in use whose results are not the same each time."""
    return any(family.may_vary() for family in _loaded())
