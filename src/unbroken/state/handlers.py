"""How the state of a live object is taken out and put back: one handler for each kind of object."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

from unbroken.errors import UnsupportedStateError

DifferenceKind = Literal["missing", "unexpected", "shape", "dtype", "other"]
# The key in a state under which gradients of a step that is not complete stand.
GRADIENTS = "(gradients)"
Horizon = Literal["keep", "stretch", "hold"]


@dataclasses.dataclass(frozen=True, slots=True)
class Difference:
    """Why a saved state does not fit a live object.

    `name` is what differs inside the part, empty for the part as a whole. "missing" is what the
    checkpoint lacks, "unexpected" what the live object lacks; `text` says what was expected and found.
    """

    kind: DifferenceKind
    name: str
    text: str

    def __str__(self) -> str:
        return f"{self.name}: {self.text}" if self.name else self.text


@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
    """Something the script set otherwise than the checkpoint: `saved` there, `script` here.

    `key` is its name, by which it may be overridden; `where` is what it belongs to inside the part, as
    `group 0`. With `is_horizon` it is the length of a schedule. What `moves` while training runs is no
    change of the script, and only counts where it is to be overridden. `note` replaces the usual text;
    with it, what stands at the paths `places` of the state may be otherwise once the state is restored.
    """

    key: str
    saved: object
    script: object
    where: str = ""
    is_horizon: bool = False
    moves: bool = False
    note: str = ""
    places: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The key, and what it belongs to."""
        return f"{self.where} {self.key}" if self.where else self.key

    def text(self, *, script_wins: bool) -> str:
        """Say which of the two values is in force."""
        if self.note:
            return self.note
        if script_wins:
            return f"{self.name}: {self.script!r} of the script is used, the checkpoint has {self.saved!r}"
        return f"{self.name}: {self.saved!r} is kept, the script sets {self.script!r}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TensorFacts:
    """What a handler says of the tensors in its states.

    `are_tied`: those of the same memory are one, as weights are; elsewhere that is a coincidence of the
    moment. `are_streamed`: `restore` takes tensors that are filled later, the live ones where those fit.
    `are_placed`: `restore` leaves them where they are, so that nothing is to be digested again.
    `settings` is the pattern of the paths of those that are settings, to be compared before they are set.
    `below` is the path under which the tensors for the name of a `Difference` stand, if it has any.
    `are_trained`: all are what training makes of parameters, and finite as long as it is sound.
    """

    are_tied: bool = False
    are_streamed: bool = False
    are_placed: bool = False
    settings: str = ""
    below: str = ""
    are_trained: bool = False


class StateHandler(Protocol):
    """Knows one kind of live object.

    `name` is written to manifests and never changes. Parts are restored in ascending `order`:
    modules, then schedulers, then optimizers (whose learning rate must win), generators last.
    """

    @property
    def name(self) -> str: ...
    @property
    def order(self) -> int: ...

    def accepts(self, value: object) -> bool:
        """Tell whether this handler is for `value`."""
        ...

    def state(self, value: Any) -> object:
        """Return the state as nested plain values; live tensors may stand in it, nothing is copied."""
        ...

    def differences(self, value: Any, state: Any) -> list[Difference]:
        """Return why `state` does not fit `value`; change nothing."""
        ...

    def restore(self, value: Any, state: Any) -> None:
        """Put `state`, which had no differences, into `value`."""
        ...


@runtime_checkable
class KnowsTensors(Protocol):
    """A handler that says more of its tensors than what holds for everybody's."""

    @property
    def tensor_facts(self) -> TensorFacts: ...


@runtime_checkable
class ComparesSettings(Protocol):
    """A handler whose objects have settings that a restore overwrites: their changes are reported."""

    def changed_settings(self, value: Any, state: Any) -> list[Setting]:
        """Return what the script set otherwise than the checkpoint; change nothing."""
        ...


@runtime_checkable
class OverridesSettings(Protocol):
    """A handler that can put settings of the script in force, where the user asks for that."""

    def override(self, value: Any, settings: Sequence[Setting]) -> None:
        """Put `settings`, found by `changed_settings` before, in force once every part is restored."""
        ...


@runtime_checkable
class ListsSettings(Protocol):
    """A handler that knows all settings that a script can override, changed or not."""

    def script_settings(self, value: Any) -> list[Setting]:
        """Return the settings of `value` as the script built it, `saved` being None."""
        ...


@runtime_checkable
class FollowsCasts(Protocol):
    """A handler whose objects keep tensors of the same dtype as those of others."""

    def cast_differences(self, value: Any, state: Any, names: Collection[str]) -> list[Difference]:
        """Return what in `state` follows the tensors `names`, which get other dtypes, or why it cannot."""
        ...

    def cast(self, value: Any, state: Any, names: Collection[str]) -> object:
        """Return `state` with the dtypes that `value` has for `names`."""
        ...


@runtime_checkable
class MovesOthers(Protocol):
    """A handler whose objects move settings of other parts: one may be restored without the other."""

    def settle(self, value: Any, restored: Collection[str]) -> Callable[[], list[tuple[str, Setting]]]:
        """Look at `value` before the parts `restored` are; return what makes mover and moved agree.

        It is called once they are restored, whenever they are, and returns the names of parts with the
        settings that it decided.
        """
        ...


@runtime_checkable
class HasHorizon(Protocol):
    """A handler whose objects plan ahead: a changed horizon is a choice of the user."""

    def with_horizon(self, value: Any, state: Any, how: Horizon) -> Callable[[], None]:
        """Look at `value` before it is restored; return what puts `how` in force once every part is."""
        ...


@runtime_checkable
class FindsUnkept(Protocol):
    """A handler that sees what changes on an object and is in no state of it."""

    def unkept_changes(self, value: Any) -> list[str]:
        """Return a line, with the full name, for each such thing that has changed since it was restored."""
        ...


@runtime_checkable
class KeepsGradients(Protocol):
    """A handler that can also keep what has been gathered towards a step that is not complete."""

    def state_inside_step(self, value: Any) -> object:
        """Return the state with the gradients; `restore` takes it as well."""
        ...


@runtime_checkable
class RenamesState(Protocol):
    """A handler whose state has names of parameters in it, which may be renamed for a restore."""

    def renamed(self, part: str, state: Any, rename: Callable[[str], str]) -> Renamed:
        """Return the encoded state of `part` with every name, such as `model.layer.weight`, renamed.

        References to tensors stay as they are: the caller changes them everywhere, by the returned paths.
        """
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Renamed:
    """An encoded state with other names, and `old path -> new path` for the tensors in it."""

    state: Any
    paths: dict[str, str]


def tensor_facts(handler: object) -> TensorFacts:
    """Return what `handler` says of its tensors."""
    return handler.tensor_facts if isinstance(handler, KnowsTensors) else TensorFacts()


ORDER_MODULE = 10
ORDER_VALUE = 20
ORDER_SCHEDULER = 30
ORDER_OPTIMIZER = 40
ORDER_GENERATOR = 90


def choose_handler(part: str, value: object, handlers: Iterable[StateHandler]) -> StateHandler:
    """Return the first handler that accepts `value`; raise UnsupportedStateError naming the part."""
    for handler in handlers:
        if handler.accepts(value):
            return handler
    cls = type(value)
    raise UnsupportedStateError(
        f"part {part!r}: cannot keep an object of type {cls.__module__}.{cls.__qualname__}",
        hint=_hint(part, value),
    )


def _hint(part: str, value: object) -> str:
    if isinstance(value, type):
        return f"pass an instance: {part}={value.__name__}(...)"
    if value is None or isinstance(value, int | float | str | bytes | tuple | frozenset):
        return (
            "a plain value cannot be changed in place: "
            f"pass {part}={{'value': {value!r}}} and use that dictionary"
        )
    if dataclasses.is_dataclass(value):
        return "a frozen dataclass cannot be changed in place: make it one that is not frozen"
    return "give its class state_dict() and load_state_dict(), or make it a dataclass"
