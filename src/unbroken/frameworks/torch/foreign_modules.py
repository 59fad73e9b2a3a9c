"""The state_dict of a file for a live module: without what wrappers put before names, tied weights as one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

import torch

from unbroken.checkpoint.weights import ATTRIBUTES, FLAGS, SPECIAL
from unbroken.errors import UsageError
from unbroken.frameworks.torch.foreign_values import UnlikeError, like
from unbroken.frameworks.torch.tensors import TorchTensor
from unbroken.frameworks.torch.wrappers import WRAPPED_AS
from unbroken.state.handlers import Difference
from unbroken.state.tensors import TensorSource, copy_bytes


def module_state(
    live: Mapping[str, Any], found: Mapping[str, Any], new_name: Callable[[str], str]
) -> tuple[dict[str, Any], list[Difference], list[str]]:
    """Return the state that a file has for a module, what differs beyond names and shapes, and notes.

    `live` is the state of the module as it is; `new_name` gives what an entry of the file becomes by the
    user's map. What every name in the file begins with is left out if they are those of the module then.
    """
    ties = _ties(live)
    names = live.keys() - SPECIAL
    before, chosen = next(
        (
            (text, spelled)
            for text, spelled in _spellings(found, new_name)
            if _fits(spelled.values(), names, ties)
        ),
        ("", None),
    )
    spelled = chosen or {name: new_name(name) for name in found}
    entries: dict[str, Any] = {}
    for name, new in spelled.items():
        if new in entries:
            raise UsageError(
                f"Run: expected a rename= that keeps tensors apart, found several that become {new!r}",
                hint="map each name of the checkpoint to one of its own",
            )
        entries[new] = found[name]
    differences = _extra_state(live, entries) + _join_tied(entries, ties)
    notes = [f"its names are taken without {before!r}"] if before else []
    kept = {key: live[key] for key in (FLAGS, ATTRIBUTES) if key in live}
    return {**entries, **kept}, differences, notes


def _spellings(
    found: Mapping[str, Any], new_name: Callable[[str], str]
) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield how names may be meant, by those in the file: as they are, and with less and less before them."""
    yield "", {name: new_name(name) for name in found}
    bare = {name: ".".join(part for part in name.split(".") if part not in WRAPPED_AS) for name in found}
    words = [word for word in WRAPPED_AS if any(word in name.split(".") for name in found)]
    while bare:
        if words:
            yield ".".join(words), {name: new_name(short) for name, short in bare.items()}
        first = {short.partition(".")[0] for short in bare.values()}
        if len(first) > 1 or not all("." in short for short in bare.values()):
            return
        words.append(first.pop())
        bare = {name: short.partition(".")[2] for name, short in bare.items()}


def _fits(found: Any, names: set[str], ties: list[list[str]]) -> bool:
    """Tell whether `found` are all of `names`; of tied ones, one may stand for the others."""
    has = set(found)
    absent = names - has
    tied = {name for group in ties if has.intersection(group) for name in group}
    return has <= names and absent <= tied


def _ties(live: Mapping[str, Any]) -> list[list[str]]:
    groups: dict[Hashable, list[str]] = defaultdict(list)
    for name, item in live.items():
        if name not in SPECIAL and isinstance(item, torch.Tensor):
            groups[TorchTensor(item).identity].append(name)
    groups.pop(None, None)
    return [group for group in groups.values() if len(group) > 1]


def _join_tied(entries: dict[str, Any], ties: list[list[str]]) -> list[Difference]:
    """Have tied names mean one tensor of the file, which may have it once or several times."""
    differences = []
    for group in ties:
        present = [name for name in group if isinstance(entries.get(name), TensorSource)]
        for name in present[1:]:
            if not _is_same(entries[present[0]], entries[name]):
                text = f"has other values than {present[0]} in the checkpoint, here both are one tensor"
                differences.append(Difference("other", name, text))
        if present:
            entries |= dict.fromkeys(group, entries[present[0]])
    return differences


def _is_same(one: TensorSource, other: TensorSource) -> bool:
    if one.identity == other.identity:
        return True
    return (one.dtype, one.shape) == (other.dtype, other.shape) and copy_bytes(one) == copy_bytes(other)


def _extra_state(live: Mapping[str, Any], entries: dict[str, Any]) -> list[Difference]:
    """Bring what is no tensor into the kind that it has here."""
    differences = []
    for name, item in entries.items():
        if name in live and not isinstance(live[name], torch.Tensor):
            try:
                entries[name] = like(live[name], item, name)
            except UnlikeError as error:
                differences.append(Difference("other", error.where, error.text))
    return differences
