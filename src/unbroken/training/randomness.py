"""The random generators of the whole process, and those that parts hold: a part that every run has."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from typing import Any

from unbroken.errors import UnsupportedStateError
from unbroken.frameworks.generators import (
    HeldGenerators,
    generator_state,
    is_generator,
    set_generator_state,
)
from unbroken.frameworks.rng import capture_global_rng, restore_present_rng, rng_differences
from unbroken.state.handlers import Difference, Setting

RNG_PART = "rng"
_HELD = "held"
# How a walk names the modules in a module.
_MODULE = re.compile(r"\._modules\['([^']*)'\]")
_MODULES = re.compile(rf"(?:{_MODULE.pattern})+")


class GlobalRandomness:
    """The generators of Python, NumPy and the loaded frameworks, and those that `parts` hold."""

    def __init__(self, parts: Mapping[str, object] | None = None) -> None:
        self._parts = {name: part for name, part in (parts or {}).items() if not is_generator(part)}
        self._held = HeldGenerators(self._parts)

    def held(self) -> dict[str, object]:
        """Return the generators that parts hold by their path, such as `model.noise.generator`."""
        return self._named(self._held)

    def found_since(self) -> list[str]:
        """Return the paths of generators that parts hold now, and of which `held` knows nothing."""
        known = {id(generator) for generator in self._held.objects()}
        now = self._named(HeldGenerators(self._parts))
        return [path for path, generator in now.items() if id(generator) not in known]

    def _named(self, held: HeldGenerators) -> dict[str, object]:
        names = {part: _module_names(value) for part, value in self._parts.items()}
        found: dict[str, object] = {}
        for path, generator in zip(held.paths, held.objects(), strict=True):
            name = _without_wrappers(path, names)
            # A wrapper may have a generator of its own that is called as the one of its module.
            found[path if name in found else name] = generator
        return found


def _without_wrappers(path: str, names: Mapping[str, Mapping[str, str]]) -> str:
    """Return the path that a walk has found with the names that modules have without their wrappers.

    `names` has for each part that is a module those of the modules in it, by what torch calls them.
    """

    def named(found: re.Match[str]) -> str:
        key = ".".join(_MODULE.findall(found[0]))
        part = path[: found.start()]
        name = names.get(part, {}).get(key)
        if name is None:
            # Somewhere inside another object.
            name = ".".join(segment for segment in key.split(".") if segment not in _wrapped_as())
        return f".{name}" if name else ""

    return _MODULES.sub(named, path)


def _module_names(part: object) -> Mapping[str, str]:
    # Only a library that is loaded can have made a module.
    if "torch" not in sys.modules:
        return {}
    from unbroken.frameworks.torch.wrappers import names_by_key

    return names_by_key(part)


def _wrapped_as() -> tuple[str, ...]:
    from unbroken.frameworks.torch.wrappers import WRAPPED_AS

    return WRAPPED_AS


class GlobalRandomnessHandler:
    """Captures and restores all of them; restored last, since building things draws."""

    name = "process.rng"
    order = 100

    def accepts(self, value: object) -> bool:
        return isinstance(value, GlobalRandomness)

    def state(self, value: Any) -> object:
        held = {path: generator_state(generator) for path, generator in value.held().items()}
        return {**capture_global_rng(), **({_HELD: held} if held else {})}

    def differences(self, value: Any, state: Any) -> list[Difference]:
        found = rng_differences(_shared(state))
        live, saved = value.held(), state.get(_HELD, {})
        found += [
            Difference("missing", path, "the checkpoint lacks this generator") for path in live.keys() - saved
        ]
        found += [
            Difference("unexpected", path, "no part holds this generator") for path in saved.keys() - live
        ]
        for path in live.keys() & saved.keys():
            mine, theirs = generator_state(live[path])["kind"], saved[path]["kind"]
            if mine != theirs:
                found.append(Difference("other", path, f"a {mine}, the checkpoint has a {theirs}"))
        return found

    def changed_settings(self, value: Any, state: Any) -> list[Setting]:
        new = _new_in(capture_global_rng(), state)
        return [
            Setting(
                name,
                None,
                "as it is",
                note=f"the generator of {name} came into use since and begins as it is",
                places=(name,),
            )
            for name in new
        ]

    def restore(self, value: Any, state: Any) -> None:
        for path, generator in value.held().items():
            if path in state.get(_HELD, {}):
                set_generator_state(generator, state[_HELD][path])
        restore_present_rng(_shared(state))

    def unkept_changes(self, value: Any) -> list[str]:
        try:
            found = value.found_since()
        except UnsupportedStateError as error:
            return [error.message]
        return [f"{path}: a random generator that was made after the run was entered" for path in found]


def _new_in(live: Mapping[str, Any], saved: Mapping[str, Any]) -> list[str]:
    """Return what is in `live` alone: libraries, and generators of one that has several."""
    found = [name for name in live if name not in saved]
    for name in live.keys() & saved.keys():
        if isinstance(live[name], Mapping) and isinstance(saved[name], Mapping):
            found += [f"{name}/{inner}" for inner in live[name] if inner not in saved[name]]
    return sorted(found)


def generators_in(state: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the generators in a state: libraries, and paths in parts."""
    return (*sorted(_shared(state)), *sorted(state.get(_HELD, {})))


def _shared(state: Mapping[str, Any]) -> dict[str, Any]:
    return {library: item for library, item in state.items() if library != _HELD}
