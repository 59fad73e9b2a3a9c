"""Modules: parameters, persistent buffers, extra state and flags, under names that no wrapper changes."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from unbroken.checkpoint.weights import ATTRIBUTES, FLAGS, SPECIAL
from unbroken.errors import UsageError
from unbroken.frameworks.generators import is_generator
from unbroken.frameworks.torch import module_names
from unbroken.frameworks.torch.counters import Counters
from unbroken.frameworks.torch.frozen import frozen_settings, override_frozen, script_frozen
from unbroken.frameworks.torch.gradients import (
    graded,
    gradient_differences,
    gradients,
    restore_gradients,
)
from unbroken.frameworks.torch.module_checks import check_complete, check_methods
from unbroken.frameworks.torch.module_names import dotted
from unbroken.frameworks.torch.tensors import overlapping, overlaps_itself, tensor_differences
from unbroken.frameworks.torch.wrappers import Place, canonical, places_of, unwrap
from unbroken.state.choices import Choices, matches
from unbroken.state.handlers import GRADIENTS, ORDER_MODULE, Difference, Renamed, Setting, TensorFacts

_EXTRA_STATE = "_extra_state"


class ModuleHandler:
    """`torch.nn.Module`, restored in place: its state_dict, its flags, the counters on it.

    `parts` is where the full names of buffers come from, which `choices.non_persistent` may ask for.

    Raises UsageError for a pattern there that stands for no non-persistent buffer.
    """

    name = "torch.module"
    order = ORDER_MODULE
    tensor_facts = TensorFacts(are_tied=True, are_streamed=True)

    def __init__(self, parts: Mapping[str, object] | None = None, choices: Choices | None = None) -> None:
        self._parts = {} if parts is None else parts
        self._non_persistent = () if choices is None else choices.non_persistent
        self._counters = Counters(self._is_known)
        check_non_persistent(self._parts, self._non_persistent)

    def accepts(self, value: object) -> bool:
        return isinstance(value, nn.Module)

    def state(self, value: Any) -> object:
        places = places_of(value)
        names = {place.key: place.name for place in places}
        modules, parameters = _modules(places), _parameters(places)
        check_methods(self._part(value), value, places)
        # Not detached: what is frozen shows only on the parameters themselves.
        live = unwrap(value).state_dict(keep_vars=True)
        tensors = {canonical(key, names): item for key, item in live.items()}
        check_complete(self._part(value), parameters, tensors)
        is_kept = self._is_kept(value)
        tensors |= {name: buffer for name, buffer in _non_persistent(modules) if is_kept(name)}
        flags = {
            "frozen": sorted(name for name, parameter in parameters if not parameter.requires_grad),
            "evaluating": sorted(name for name, module in modules if not module.training),
            **graded(parameters),
        }
        shared = overlapping({name: item for name, item in tensors.items() if isinstance(item, torch.Tensor)})
        if shared:
            flags["overlapping"] = shared
        attributes = self._counters.state(modules, is_kept)
        return {**tensors, FLAGS: flags, **({ATTRIBUTES: attributes} if attributes else {})}

    def state_inside_step(self, value: Any) -> object:
        state: Any = self.state(value)
        found = gradients(_parameters(places_of(value)))
        return {**state, GRADIENTS: found} if found else state

    def differences(self, value: Any, state: Any) -> list[Difference]:
        live: Any = self.state(value)
        mine, theirs = live.keys() - SPECIAL, state.keys() - SPECIAL
        places = places_of(value)
        buffers = dict(_non_persistent(_modules(places)))
        missing = mine - theirs
        unexpected = theirs - mine - {name for name, _, _ in _unmade(_modules(places))}
        found = [Difference("missing", name, "the checkpoint lacks it") for name in live if name in missing]
        for name in state:
            if name in unexpected:
                text = (
                    "the model keeps it only by non_persistent=" if name in buffers else "the model lacks it"
                )
                found.append(Difference("unexpected", name, text))
        for name, item in live.items():
            if name in theirs and isinstance(item, torch.Tensor) and not name.endswith(_EXTRA_STATE):
                differences = tensor_differences(name, item, state[name])
                # Made anew by its module when it is too short, and restored in any shape.
                found += [one for one in differences if one.kind == "dtype" or name not in buffers]
        return [
            *found,
            *_memory_differences(live[FLAGS], state.get(FLAGS, {})),
            *gradient_differences(_parameters(places), state.get(GRADIENTS, {})),
            *_attribute_differences(_modules(places), state.get(ATTRIBUTES, {})),
        ]

    def restore(self, value: Any, state: Any) -> None:
        """Put what fits of `state` into `value`; what is missing or of another shape is left as it is."""
        places = places_of(value)
        modules, parameters = _modules(places), _parameters(places)
        _load(unwrap(value), places, state)
        _load_non_persistent(modules, state, self._is_kept(value))
        for name, module, leaf in _unmade(modules):
            if name in state:
                module._buffers[leaf] = _filled(None, state[name], module)
        flags = state.get(FLAGS, {})
        frozen, evaluating = set(flags.get("frozen", ())), set(flags.get("evaluating", ()))
        for name, parameter in parameters:
            if name in state or name in frozen:
                parameter.requires_grad_(name not in frozen)
        for place in places:
            place.module.training = place.name not in evaluating
        self._counters.restore(modules, state.get(ATTRIBUTES, {}))
        restore_gradients(parameters, flags, state.get(GRADIENTS, {}))

    def script_settings(self, value: Any) -> list[Setting]:
        return script_frozen(_parameters(places_of(value)))

    def changed_settings(self, value: Any, state: Any) -> list[Setting]:
        return frozen_settings(_parameters(places_of(value)), state)

    def override(self, value: Any, settings: Sequence[Setting]) -> None:
        override_frozen(_parameters(places_of(value)), settings)

    def renamed(self, part: str, state: Any, rename: Callable[[str], str]) -> Renamed:
        return module_names.renamed(part, state, rename)

    def unkept_changes(self, value: Any) -> list[str]:
        """Return a line for each thing on `value` that has changed since it was restored and is not kept."""
        part = self._part(value)
        modules = _modules(places_of(value))
        return [
            f"{dotted(part, name)}: {text} that changes and is not kept"
            for name, text in self._counters.unkept(modules, self._is_kept(value))
        ]

    def _is_known(self, value: object) -> bool:
        return is_generator(value) or any(value is part for part in self._parts.values())

    def _is_kept(self, value: nn.Module) -> Callable[[str], bool]:
        part, patterns = self._part(value), self._non_persistent
        return lambda name: bool(patterns) and matches(dotted(part, name), patterns)

    def _part(self, value: nn.Module) -> str:
        return next((name for name, other in self._parts.items() if other is value), "")


def check_non_persistent(parts: Mapping[str, object], patterns: Iterable[str]) -> None:
    """Raise UsageError for one of `patterns` that stands for no non-persistent buffer of a module."""
    patterns = tuple(patterns)
    if not patterns:
        return
    known = [
        dotted(part, name)
        for part, value in parts.items()
        if isinstance(value, nn.Module)
        for name, _ in _non_persistent(_modules(places_of(value)))
    ]
    for pattern in patterns:
        if not any(matches(name, [pattern]) for name in known):
            raise UsageError(
                f"non_persistent: expected the name of a non-persistent buffer, found {pattern!r}",
                hint=f"there are {', '.join(known)}" if known else "no module has a non-persistent buffer",
            )


def parameter_names(parts: Mapping[str, object]) -> dict[int, str]:
    """Return `id(tensor) -> name` for the parameters of all modules among `parts` and the tensors in them."""
    names: dict[int, str] = {}
    for part, value in parts.items():
        for name, parameter in _tensors(value):
            names.setdefault(id(parameter), f"{part}.{name}" if name else part)
    return names


def _tensors(value: object) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, nn.Module):
        yield from _parameters(places_of(value))
    elif isinstance(value, torch.Tensor):
        yield "", value
    elif isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        yield from ((str(key), item) for key, item in items if isinstance(item, torch.Tensor))


def _modules(places: Iterable[Place]) -> list[tuple[str, nn.Module]]:
    """Return each of the user's own modules once, by its first name."""
    seen: dict[int, tuple[str, nn.Module]] = {}
    for place in places:
        if not place.is_wrapper:
            seen.setdefault(id(place.module), (place.name, place.module))
    return list(seen.values())


def _parameters(places: Iterable[Place]) -> list[tuple[str, nn.Parameter]]:
    """Return each parameter once, by its first name."""
    seen: dict[int, tuple[str, nn.Parameter]] = {}
    for place in places:
        for leaf, parameter in place.module._parameters.items():
            if parameter is not None:
                seen.setdefault(id(parameter), (dotted(place.name, leaf), parameter))
    return list(seen.values())


def _non_persistent(modules: Iterable[tuple[str, nn.Module]]) -> Iterator[tuple[str, torch.Tensor | None]]:
    for name, module in modules:
        for leaf in sorted(module._non_persistent_buffers_set):
            yield dotted(name, leaf), module._buffers.get(leaf)


def _unmade(modules: Iterable[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module, str]]:
    """Return the buffers that their modules are still to make, when they see the first batch."""
    return [
        (dotted(name, leaf), module, leaf)
        for name, module in modules
        for leaf, buffer in module._buffers.items()
        if buffer is None and leaf not in module._non_persistent_buffers_set
    ]


def _load(module: nn.Module, places: Iterable[Place], state: Mapping[str, Any]) -> None:
    """Have `module` load those entries of its state_dict that `state` has in the same shape."""
    names, own = {}, set()
    for place in places:
        names[place.key] = place.name
        own |= {id(parameter) for parameter in place.module._parameters.values()}
        for leaf, buffer in place.module._buffers.items():
            if buffer is not None and overlaps_itself(buffer):
                # Elements that share memory cannot be filled.
                place.module._buffers[leaf] = buffer.contiguous()
        own |= {id(buffer) for buffer in place.module._buffers.values()}
    live = module.state_dict(keep_vars=True)
    loaded: OrderedDict[str, Any] = OrderedDict()
    # Old layouts are converted by the versions that stand there.
    loaded._metadata = getattr(live, "_metadata", None)  # type: ignore[attr-defined]
    for key, item in live.items():
        name = canonical(key, names)
        if name not in state:
            continue
        saved = state[name]
        if id(item) not in own:
            # Extra state may be kept as it is given, and tensors in it lie in the bytes that were read.
            loaded[key] = copy.deepcopy(saved)
        elif isinstance(saved, torch.Tensor) and saved.shape == item.shape:
            loaded[key] = saved
    module.load_state_dict(loaded, strict=len(loaded) == len(live))


def _load_non_persistent(
    modules: Iterable[tuple[str, nn.Module]], state: Mapping[str, Any], is_kept: Callable[[str], bool]
) -> None:
    for name, module in modules:
        for leaf in module._non_persistent_buffers_set:
            full = dotted(name, leaf)
            if full in state and is_kept(full):
                module._buffers[leaf] = _filled(module._buffers.get(leaf), state[full], module)


def _filled(live: torch.Tensor | None, saved: torch.Tensor | None, module: nn.Module) -> torch.Tensor | None:
    if live is not None and saved is not None and live.shape == saved.shape:
        return live.copy_(saved)
    if saved is None:
        return None
    near = live if live is not None else next(module.parameters(), saved)
    return saved.to(device=near.device)


def _memory_differences(live: Mapping[str, Any], saved: Mapping[str, Any]) -> list[Difference]:
    """Memory shared on one side only would be restored right, and then trained apart or together."""
    mine, theirs = ({tuple(names) for names in flags.get("overlapping", ())} for flags in (live, saved))
    return [
        Difference("other", "", f"{', '.join(names)}: share memory {where}")
        for groups, where in (
            (mine - theirs, "here, not in the checkpoint"),
            (theirs - mine, "in the checkpoint, not here"),
        )
        for names in sorted(groups)
    ]


def _attribute_differences(
    modules: Iterable[tuple[str, nn.Module]], saved: Mapping[str, Mapping[str, Any]]
) -> list[Difference]:
    known = {name for name, _ in modules}
    return [
        Difference("unexpected", dotted(name, attribute), "the model lacks the module that it counts for")
        for name, attributes in saved.items()
        if name not in known
        for attribute in attributes
    ]
