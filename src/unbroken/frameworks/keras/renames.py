"""Other names for what stands in the saved state of a model, and which of them would make it fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from unbroken.checkpoint.weights import FLAGS, REPLICAS
from unbroken.errors import UsageError
from unbroken.frameworks.keras.beside import LAYERS, METRICS, OPTIMIZER, SEEDS, is_beside
from unbroken.frameworks.keras.layer_settings import CLASS, FROZEN
from unbroken.frameworks.keras.optimizers import GROUPS, OWN, renamed_groups, renamed_names
from unbroken.frameworks.keras.structure import dotted
from unbroken.frameworks.keras.weight_files import FILE
from unbroken.state.handlers import Difference, Renamed
from unbroken.state.tree import join

_SLOTS = f"{OPTIMIZER}."


def renamed_structure(part: str, state: Mapping[str, Any], rename: Callable[[str], str]) -> Renamed:
    """Return the encoded state of a model with every name below `part` renamed, and the paths of its tensors.

    Raises UsageError if two names become one, or if one leaves the part.
    """

    def new_name(name: str) -> str:
        return _below(part, rename(dotted(part, name)))

    variables = renamed_names({name: None for name in state if not is_beside(name)}, new_name)
    paths = {join(part, old): join(part, new) for old, new in variables.items()}
    result: dict[str, Any] = {new: state[old] for old, new in variables.items()}
    frozen = [_layer_name(part, name, rename) for name in state[FLAGS][FROZEN]]
    result[FLAGS] = {**state[FLAGS], FROZEN: frozen}
    result[LAYERS] = {_layer_name(part, name, rename): item for name, item in state[LAYERS].items()}
    result[FILE] = state[FILE]
    if OPTIMIZER in state:
        groups = renamed_groups(state[OPTIMIZER][GROUPS], new_name)
        result[OPTIMIZER] = {**state[OPTIMIZER], GROUPS: groups}
    for key in state:
        if key.startswith(_SLOTS):
            name = key.removeprefix(_SLOTS)
            moved = key if name == OWN else dotted(OPTIMIZER, new_name(name))
            result[moved] = state[key]
            before, after = join(part, key), join(part, moved)
            paths |= {join(before, slot): join(after, slot) for slot in state[key]}
        elif key.startswith(f"{SEEDS}."):
            moved = dotted(SEEDS, new_name(key.removeprefix(f"{SEEDS}.")))
            result[moved] = state[key]
            paths[join(part, key)] = join(part, moved)
        elif key.startswith(f"{METRICS}."):
            result[key] = state[key]
        elif key == REPLICAS:
            result[key], moved_copies = _renamed_replicas(part, state[key], new_name)
            paths |= moved_copies
    return Renamed(result, paths)


def _renamed_replicas(
    part: str, replicas: Mapping[str, Any], new_name: Callable[[str], str]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the copies that are kept for each replica under the new names, and the paths of the tensors."""
    place = join(part, REPLICAS)
    moved = {name: name if is_beside(name) else new_name(name) for name in replicas}
    paths = {
        f"{join(place, old)}/{index}": f"{join(place, new)}/{index}"
        for old, new in moved.items()
        for index in range(len(replicas[old]))
    }
    return {new: replicas[old] for old, new in moved.items()}, paths


def _layer_name(part: str, name: str, rename: Callable[[str], str]) -> str:
    full = dotted(part, name)
    new = rename(full)
    if new == full:
        # A pattern may want the dot after the name, as all names of variables have it.
        new = rename(f"{full}.").removesuffix(".")
    return _below(part, new)


def _below(part: str, full: str) -> str:
    if full != part and not full.startswith(f"{part}."):
        raise UsageError(
            f"rename: expected names of part {part!r} to stay in it, found that one becomes {full}",
            hint="rename inside of a part, or the whole part",
        )
    return full[len(part) + 1 :]


def with_suggestions(
    part: str, mine: Mapping[str, Any], saved: Mapping[str, Any], found: Sequence[Difference]
) -> list[Difference]:
    """Return the differences `found` between layers, with the rename that would make those `saved` fit."""
    renames = _renames(mine, saved)
    if not renames or not any(one.kind == "missing" for one in found):
        return list(found)
    return [replace(one, text=one.text + _suggestion(part, one, renames)) for one in found]


def _suggestion(part: str, difference: Difference, renames: Mapping[str, str]) -> str:
    if difference.kind != "missing":
        return ""
    for old, new in renames.items():
        if difference.name.startswith(f"{new}."):
            there = old + difference.name[len(new) :]
            rule = {dotted(part, old): dotted(part, new)}
            return f"; in the same place it has {there}: if that is meant, say rename={rule}"
    return ""


def _renames(mine: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, str]:
    """Return `old name -> new name` for layers that have the same place and class in both."""
    here, there = ([(name, layer[CLASS]) for name, layer in layers.items()] for layers in (mine, saved))
    if [cls for _, cls in here] != [cls for _, cls in there]:
        return {}
    found: dict[str, str] = {}
    for (new, _), (old, _) in zip(here, there, strict=True):
        inherited = any(old == before + new[len(after) :] for before, after in found.items())
        if old != new and not inherited:
            found[old] = new
    return found
