"""What the run asks of a framework that the program uses: each answers for the objects that are its own."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from unbroken.state.choices import Choices
from unbroken.state.handlers import StateHandler
from unbroken.state.tree import LeafCodec


class LowerRates(Protocol):
    """Keeps learning rates lower until it is closed."""

    def refresh(self) -> None:
        """Take the factor of the step that comes."""

    def close(self) -> None:
        """Lower no more."""


class Watch(Protocol):
    """Looks at what trains the parts of a run."""

    @property
    def has_news(self) -> bool:
        """Whether something came into use that nobody has looked at."""
        ...

    def take_stepped(self) -> bool:
        """Tell whether an optimizer has stepped since this was asked last; True where nobody can know."""
        ...

    def lost(self) -> list[tuple[str, bool]]:
        """Return what is at work and no part, each with whether that is certain."""
        ...

    def close(self) -> None:
        """Look no more."""
        ...


class Family:
    """A framework. It answers as if it knew none of the objects, where it has nothing else to say.

    `parts` are the live objects of a run by name; they are read when they are used, so they may grow.
    """

    def codecs(self, *, describes: bool) -> list[LeafCodec]:
        """Return the codecs of its values; with `describes` what they load may have dtype and shape only."""
        return []

    def handlers(self, parts: Mapping[str, object], choices: Choices) -> list[StateHandler]:
        """Return the handlers of its objects, as they are asked."""
        return []

    def own_parts(self, parts: Mapping[str, object], choices: Choices) -> Mapping[str, object]:
        """Return the parts that a run with `parts` has by itself, by name."""
        return {}

    def weights(self, model: object) -> Any:
        """Return the weights of a model, to be compared and filled; None if it is none."""
        return None

    def begin_from(
        self, source: Path, parts: Mapping[str, object], new_name: Callable[[str], str], choices: Choices
    ) -> Any:
        """Return what a checkpoint of this framework's own holds for `parts`, or None if it is none.

        `new_name` gives for the names there those of the parts. Parts that are `fresh` are left alone.
        """
        return None

    def resumable_loader(self, loader: object) -> Any:
        """Return `loader` made resumable, or None if it is not of this framework."""
        return None

    def keyed_loader(self, loader: object, name: str) -> Any:
        """Return `loader` with keyed randomness, or None if there is none for it."""
        return None

    def environment(self) -> dict[str, object]:
        """Return what decides the bits of a result: versions, threads, devices, kernels, precision."""
        return {}

    def watch(self, parts: Mapping[str, object]) -> Watch | None:
        """Begin to look at what trains `parts` and return who looks, or None."""
        return None

    def mark_gradients(self, parts: Mapping[str, object]) -> Callable[[], bool] | None:
        """Return a function that tells whether gradients of `parts` have changed since now."""
        return None

    def drop_gradients(self, values: Iterable[object]) -> None:
        """Let go of the gradients of what `values` are or train."""

    def mark_modes(self, parts: Mapping[str, object]) -> Callable[[], None] | None:
        """Return a function that puts the models of `parts` back into the modes, train or eval, of now."""
        return None

    def lower_rates(
        self, parts: Mapping[str, object], factor: Callable[[], float]
    ) -> tuple[LowerRates | None, list[str]]:
        """Multiply the rates of the optimizers among `parts` by `factor()` as they step.

        Also return the names of the parts that look like optimizers and whose rates cannot be lowered.
        """
        return None, []

    def highest_rate(self, parts: Mapping[str, object]) -> Callable[[], float | None] | None:
        """Return a function that tells the highest learning rate among `parts` of now."""
        return None

    def has_scaler(self, parts: Mapping[str, object]) -> bool:
        """Tell whether something among `parts` leaves out steps whose gradients overflow."""
        return False

    def check_processes(self) -> None:
        """Raise UsageError where this process trains together with others and cannot have a run."""

    def ranks(self) -> Any:
        """Return the ranks that train together, to ask each other in each step, or None."""
        return None

    def step_watch(
        self, parts: Mapping[str, object], usual: Collection[str], before: Any, *, runs_eagerly: bool
    ) -> Any:
        """Return what looks, in a step done in its block, for what is not finite and should be, or None."""
        return None

    def bad_tensors(self, parts: Mapping[str, object]) -> list[str]:
        """Return the names of the tensors in models, and of their gradients, that are not finite."""
        return []

    def bad_rows(self, batch: object, size: int) -> list[int]:
        """Return the places in `batch` of those of its `size` samples whose numbers are not finite."""
        return []

    def may_vary(self) -> bool:
        """Tell whether kernels may be in use whose results are not the same each time."""
        return False
