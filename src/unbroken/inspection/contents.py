"""What the state of each part says, without the program it came from: read from tagged JSON alone.

Handlers of other releases, and of users, may write other states: what is not there is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unbroken.checkpoint.manifest import Manifest, PartEntry, TensorEntry
from unbroken.state.readable import readable

_FLAGS, _ATTRIBUTES, _GRADIENTS = "(flags)", "(attributes)", "(gradients)"
# These keep a class beside what is of interest.
_INNER = {"torch.scheduler": "state", "python.object": "attributes"}
# The states of these are tensors, and the words of generators: nothing in them is for people.
_WITHOUT_VALUES = frozenset({"torch.tensor", "numpy.array", "process.rng", "generator"})

# What the kinds of generators begin with.
_LIBRARIES = ("random.", "numpy.", "torch.", "keras.", "tensorflow.")


def parts(manifest: Manifest) -> dict[str, dict[str, Any]]:
    """Return what is known of each part: always its class, its handler and its tensors, then by its kind.

    Modules have `frozen`, `evaluating`, `attributes` and `gradients`, optimizers `groups` and `states`,
    others `values`.
    """
    members: dict[str, list[TensorEntry]] = {}
    for path, tensor in manifest.tensors.items():
        # Tied tensors count in each part that they are reached from.
        for name in {at.partition("/")[0]: None for at in (path, *tensor.aliases)}:
            members.setdefault(name, []).append(tensor)
    return {name: _part(entry, members.get(name, [])) for name, entry in manifest.parts.items()}


def _part(entry: PartEntry, mine: list[TensorEntry]) -> dict[str, Any]:
    return {
        "type": entry.type,
        "handler": entry.handler,
        "tensors": len(mine),
        "size_bytes": sum(tensor.size_bytes for tensor in mine),
        "dtypes": _dtypes(mine),
        **_by_kind(entry),
    }


def tied(manifest: Manifest) -> list[list[str]]:
    """Return the groups of paths that lead to one tensor each."""
    return [[path, *entry.aliases] for path, entry in manifest.tensors.items() if entry.aliases]


def generators(manifest: Manifest) -> list[dict[str, str]]:
    """Return the random generators whose states are kept: where each is found, and of which kind it is."""
    found: list[dict[str, str]] = []
    for name, entry in manifest.parts.items():
        state = _mapping(entry.state)
        if entry.handler == "process.rng":
            inner = _mapping(state.get("held"))
            shared = {library: item for library, item in state.items() if library != "held"}
            found += [{"where": name, "kind": kind} for kind in _process_kinds(shared)]
            found += [item for path, kept in inner.items() for item in _held(_mapping(kept), path)]
        else:
            found += _held(state, name)
    for index, loader in enumerate(_loaders(manifest)):
        found += _held(_mapping(_mapping(loader.get("state")).get("generators")), f"loader {index}")
    return found


def position(manifest: Manifest) -> dict[str, Any]:
    """Return where training stood: the epoch, its passes over loaders, and what each had given out.

    A loader that has not been used again since a resume has nothing but its name.
    """
    saved = manifest.position
    return {
        "epoch": saved.epoch,
        "inside_epoch": saved.inside_epoch,
        "passes": list(saved.passes),
        "open": list(saved.open),
        "loaders": [_loader(loader) for loader in _loaders(manifest)],
    }


def _by_kind(entry: PartEntry) -> dict[str, Any]:
    state = _mapping(entry.state)
    if entry.handler == "torch.module":
        flags = _mapping(state.get(_FLAGS))
        return {
            "frozen": readable(flags.get("frozen", [])),
            "evaluating": readable(flags.get("evaluating", [])),
            "attributes": readable(state.get(_ATTRIBUTES, {})),
            "gradients": len(_mapping(state.get(_GRADIENTS))),
        }
    if entry.handler == "keras.model":
        groups = _mapping(state.get("(optimizer)")).get("groups", [])
        return {
            "frozen": readable(_mapping(state.get(_FLAGS)).get("frozen", [])),
            "groups": [_group(group) for group in groups],
        }
    if entry.handler in ("torch.optimizer", "keras.optimizer"):
        groups = state.get("groups")
        return {
            "groups": [_group(group) for group in groups] if isinstance(groups, list) else [],
            "states": len(_mapping(state.get("state"))),
        }
    if entry.handler in _INNER:
        return {"values": readable(state.get(_INNER[entry.handler]))}
    if entry.handler in _WITHOUT_VALUES:
        return {}
    return {"values": readable(entry.state)}


def _group(group: Any) -> dict[str, Any]:
    fields = _mapping(group)
    return {
        "parameters": readable(fields.get("params", [])),
        "options": readable(fields.get("options", {})),
    }


def _dtypes(tensors: list[TensorEntry]) -> dict[str, int]:
    """Return the bytes of each dtype, the largest first."""
    found: dict[str, int] = {}
    for tensor in tensors:
        found[tensor.dtype] = found.get(tensor.dtype, 0) + tensor.size_bytes
    return dict(sorted(found.items(), key=lambda item: (-item[1], item[0])))


def _process_kinds(state: Mapping[str, Any]) -> list[str]:
    kinds: list[str] = []
    for library, states in state.items():
        # One for each CUDA device, all others one in all.
        each = readable(states) if library == "cuda" else None
        kinds += [f"{library}:{index}" for index in range(len(each))] if isinstance(each, list) else [library]
    return kinds


def _held(state: Mapping[str, Any], where: str) -> list[dict[str, str]]:
    """Return the generators in a state: each is kept with its kind."""
    if len(state) == 2 and state.keys() == {"kind", "state"} and str(state["kind"]).startswith(_LIBRARIES):
        return [{"where": where, "kind": str(state["kind"])}]
    found = []
    for key, inner in state.items():
        if isinstance(inner, dict) and "$tensor" not in inner and not key.startswith("$"):
            found += _held(inner, f"{where}.{key}")
    return found


def _loaders(manifest: Manifest) -> list[Mapping[str, Any]]:
    loaders = manifest.position.loaders
    return [_mapping(loader) for loader in loaders] if isinstance(loaders, list) else []


def _loader(loader: Mapping[str, Any]) -> dict[str, Any]:
    state = _mapping(loader.get("state"))
    return {
        "name": loader.get("name"),
        # Of a pass over an iterable that is no data loader, the items are counted.
        "samples": state.get("samples"),
        "batches": state.get("batches", state.get("consumed")),
        "workers": len(_mapping(readable(state.get("workers")))),
        "generators": sorted(_mapping(state.get("generators"))),
    }


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}
