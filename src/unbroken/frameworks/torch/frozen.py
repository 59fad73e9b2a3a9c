"""Which parameters are trained: in the checkpoint, and as the script has built them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import nn

from unbroken.checkpoint.weights import FLAGS
from unbroken.state.handlers import Setting

Parameters: TypeAlias = Iterable[tuple[str, nn.Parameter]]

_KEY = "requires_grad"


@dataclass(frozen=True, slots=True)
class Trained:
    """All parameters but those that are `frozen`; `shown` says it by whole modules where it can."""

    frozen: frozenset[str]
    shown: str

    def __repr__(self) -> str:
        return self.shown


def script_frozen(parameters: Parameters) -> list[Setting]:
    """Return what the script trains as a setting."""
    live = {name: parameter.requires_grad for name, parameter in parameters}
    frozen = {name for name, is_trained in live.items() if not is_trained}
    return [Setting(_KEY, None, _trained(live, frozen))]


def frozen_settings(parameters: Parameters, state: Mapping[str, Any]) -> list[Setting]:
    """Return what the script trains as a setting, if `state` has it otherwise."""
    parameters = list(parameters)
    frozen = set(state.get(FLAGS, {}).get("frozen", ()))
    script = script_frozen(parameters)[0].script
    assert isinstance(script, Trained)
    # What the checkpoint lacks is as the script has it.
    saved = {name for name, _ in parameters if name in frozen or name in script.frozen - state.keys()}
    if saved == script.frozen:
        return []
    return [Setting(_KEY, _trained([name for name, _ in parameters], saved), script)]


def override_frozen(parameters: Parameters, settings: Sequence[Setting]) -> None:
    """Freeze and train what the script does."""
    for setting in settings:
        script = setting.script
        assert isinstance(script, Trained)
        for name, parameter in parameters:
            parameter.requires_grad_(name not in script.frozen)
            if name in script.frozen:
                # One of zeros, as it is restored, would move it by weight decay and momentum.
                parameter.grad = None


def _trained(names: Iterable[str], frozen: Collection[str]) -> Trained:
    # Every module around something that is trained.
    open_places = {place for name in names if name not in frozen for place in _places(name)}
    closed = dict.fromkeys(
        next(place for place in _places(name) if place not in open_places) for name in sorted(frozen)
    )
    if not closed:
        return Trained(frozenset(), "all")
    return Trained(frozenset(frozen), "none" if "" in closed else f"all but {', '.join(closed)}")


def _places(name: str) -> Iterator[str]:
    """Yield the names of the modules around a parameter, outer ones first, and its own."""
    yield ""
    segments = name.split(".")
    for count in range(1, len(segments) + 1):
        yield ".".join(segments[:count])
