"""The weights in a checkpoint: the part that they are of, and where each of them lies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from unbroken.checkpoint.manifest import Manifest
from unbroken.errors import UsageError
from unbroken.state.handlers import GRADIENTS

# The handlers of models, and what the tensors that are weights are of there.
_MODELS = {"torch.module": "torch", "keras.model": "host"}
FLAGS, ATTRIBUTES = "(flags)", "(attributes)"
# Of a state with variables of a strategy: the copies that are not all alike.
REPLICAS = "(replicas)"
# What stands beside the parameters, buffers and extra state of a module.
SPECIAL = frozenset({FLAGS, ATTRIBUTES, GRADIENTS})
_TENSOR, _LIBRARY, _PAIRS = "$tensor", "as", "$dict"


@dataclass(frozen=True, slots=True, kw_only=True)
class PartWeights:
    """The weights of the module `part`: the paths of its tensors, by their names in its state_dict.

    Tied weights have one path. `others` are the entries of its state_dict that are no tensors, and
    `attributes` the plain attributes of its modules that training changes; both are tagged JSON.
    """

    part: str
    paths: dict[str, str]
    others: dict[str, Any]
    attributes: Any

    @property
    def tied(self) -> dict[str, str]:
        """Each further name of a tensor, and its first one."""
        first: dict[str, str] = {}
        return {
            name: first[path] for name, path in self.paths.items() if first.setdefault(path, name) != name
        }


def weights_in(manifest: Manifest, part: str | None) -> PartWeights:
    """Return where the weights of the module `part` lie, or of the only one there is.

    Raises UsageError if there is no such module, or if there are several and none is named.
    """
    modules = [name for name, entry in manifest.parts.items() if entry.handler in _MODELS]
    chosen = modules[0] if part is None and len(modules) == 1 else part
    if chosen not in modules:
        known = f"one of the modules {', '.join(modules)}" if modules else "a module with weights"
        raise UsageError(
            f"step {manifest.step}: expected {known}, found {'no name' if part is None else repr(part)}",
            hint="say by part which of them is meant" if modules else "`unbroken inspect` lists the parts",
        )
    entries, library = _entries(manifest.parts[chosen].state), _MODELS[manifest.parts[chosen].handler]
    named = {name: entry for name, entry in entries.items() if not _is_beside(name, library)}
    paths = {name: str(entry[_TENSOR]) for name, entry in named.items() if _is_tensor(entry, library)}
    return PartWeights(
        part=chosen,
        paths=paths,
        others={name: entry for name, entry in named.items() if name not in paths},
        attributes=entries.get(ATTRIBUTES, {}),
    )


def _is_beside(name: str, library: str) -> bool:
    # Of a compiled model much stands there: its optimizer, metrics and generators.
    return name in SPECIAL or (library != "torch" and name.startswith("("))


def _is_tensor(entry: Any, library: str) -> bool:
    # Of other libraries are only what a module calls its extra state.
    return isinstance(entry, dict) and _TENSOR in entry and entry.get(_LIBRARY) == library


def _entries(state: Any) -> Mapping[str, Any]:
    """Return the entries of an encoded state; names that begin with a dollar sign make it a list of pairs."""
    if not isinstance(state, dict):
        return {}
    return dict(state[_PAIRS]) if state.keys() == {_PAIRS} else state
