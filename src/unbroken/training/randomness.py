"""The random generators of the whole process, and those that parts hold: a part that every run has."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from unbroken.frameworks.generators import (
    HeldGenerators,
    generator_state,
    is_generator,
    set_generator_state,
)
from unbroken.frameworks.rng import capture_global_rng, restore_global_rng, rng_differences
from unbroken.state.handlers import Difference, Setting

RNG_PART = "rng"
_HELD = "held"
# How a walk names the modules in a module, and what wrappers call the one in them.
_INNER_MODULE = re.compile(r"\._modules\['([^']*)'\]")
_WRAPPER = re.compile(r"\.(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\b")


class GlobalRandomness:
    """The generators of Python, NumPy and the loaded frameworks, and those that `parts` hold."""

    def __init__(self, parts: Mapping[str, object] | None = None) -> None:
        roots = {name: part for name, part in (parts or {}).items() if not is_generator(part)}
        self._held = HeldGenerators(roots)

    def held(self) -> dict[str, object]:
        """Return the generators that parts hold by their path, such as `model.noise.generator`."""
        paths = (_WRAPPER.sub("", _INNER_MODULE.sub(r".\1", path)) for path in self._held.paths)
        return dict(zip(paths, self._held.objects(), strict=True))


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
        found = [Difference("other", "", text) for text in rng_differences(_shared(state))]
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
        new = sorted(set(capture_global_rng()) - set(state))
        return [
            Setting(
                name,
                None,
                "as it is",
                note=f"the generator of {name} came into use since and begins as it is",
            )
            for name in new
        ]

    def restore(self, value: Any, state: Any) -> None:
        for path, generator in value.held().items():
            if path in state.get(_HELD, {}):
                set_generator_state(generator, state[_HELD][path])
        restore_global_rng(_shared(state))


def generators_in(state: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the generators in a state: libraries, and paths in parts."""
    return (*sorted(_shared(state)), *sorted(state.get(_HELD, {})))


def _shared(state: Mapping[str, Any]) -> dict[str, Any]:
    return {library: item for library, item in state.items() if library != _HELD}
