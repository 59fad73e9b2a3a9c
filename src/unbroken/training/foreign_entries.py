"""Which state in a checkpoint of another library belongs to which part, told by what is in it. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from unbroken.errors import UsageError
from unbroken.state.tensors import TensorSource

Kind = Literal["model", "optimizer", "scheduler", "scaler"]

# What scripts add to the name of a part, the longest first.
_ENDINGS = ("_state_dict", "_states", "_state")
_SCHEDULER = frozenset({"_step_count", "base_lrs", "_last_lr", "_schedulers"})
_SCALER = frozenset({"scale", "growth_factor", "backoff_factor", "growth_interval"})
# States of random generators are tensors of bytes; so are long byte strings.
_BYTES = "U8"
_EXTRA_STATE = "_extra_state"
# {"state": {"optimizers": [{...}]}} is as deep as training states nest these.
_DEEPEST = 3
_STEP = "global_step"
# How others count, who may mean the steps of an epoch.
_COUNTS = ("step", "steps", "global_steps", "iteration", "iter", "iter_num", "num_updates")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A state in a checkpoint: `name` is where it stands, the keys that lead there with dots between."""

    name: str
    kind: Kind
    value: dict[str, Any]


def entries_of(values: Mapping[str, Any]) -> list[Entry]:
    """Return the states of models, optimizers, schedulers and gradient scalers in `values`."""
    if _is_model(values):
        # A bare state_dict.
        return [Entry(name="model", kind="model", value=dict(values))]
    return [*_below(values, "", 0)]


def assign(
    entries: Sequence[Entry],
    wanted: Mapping[str, Kind],
    new_name: Callable[[str], str],
    fresh: Collection[str] = (),
) -> dict[str, Entry]:
    """Return the entry for each of the `wanted` parts, as far as there is one.

    An entry that is called like a part, as `new_name` gives its name, is of that part; else there is to be
    one alone of its kind that no other part has. Those that are `fresh` need none.

    Raises UsageError where several may be meant.
    """
    found: dict[str, Entry] = {}
    renamed = [entry for entry in entries if new_name(entry.name) != entry.name]
    for entry in (*renamed, *(entry for entry in entries if entry not in renamed)):
        names = (new_name(entry.name),) if entry in renamed else (entry.name, _bare(entry.name))
        for name in dict.fromkeys(names):
            if name in wanted and wanted[name] == entry.kind:
                # What the user names is meant, whatever else is called so.
                is_named = name in found and found[name] in renamed and entry not in renamed
                if name in found and not is_named:
                    raise _several(name, [found[name], entry])
                found.setdefault(name, entry)
                break
    left = [entry for entry in entries if entry not in found.values()]
    for kind in dict.fromkeys(wanted.values()):
        parts = [name for name, of in wanted.items() if of == kind and name not in (*found, *fresh)]
        free = [entry for entry in left if entry.kind == kind]
        if not parts or not free:
            continue
        if len(parts) > 1 or len(free) > 1:
            raise _several(parts[0], free)
        found[parts[0]] = free[0]
    return found


def others(values: Mapping[str, Any], entries: Collection[Entry], taken: Collection[str]) -> list[str]:
    """Return the keys at the top of `values` that hold none of `entries` and are not `taken`."""
    of_entries = {entry.name.partition(".")[0] for entry in entries}
    is_bare = not of_entries.intersection(values)
    return [] if is_bare and entries else [key for key in values if key not in of_entries | set(taken)]


def step_in(values: Mapping[str, Any], made: int | None) -> tuple[int, str]:
    """Return how many steps a checkpoint says were made, and how that is known.

    `made` is how often its optimizer has stepped, None if that is not known. `global_step` means just that;
    other counters may count otherwise.
    """
    state = values.get("trainer_state")
    for where in (values, state if isinstance(state, dict) else {}):
        said = where.get(_STEP)
        if isinstance(said, int) and _is_count(said):
            return said, f"step {said} is its {_STEP}"
    if made is not None:
        return made, f"step {made} is how often its optimizer has stepped"
    said_by = {key: values[key] for key in _COUNTS if _is_count(values.get(key))}
    if len(set(said_by.values())) == 1:
        key, said = next(iter(said_by.items()))
        return said, f"step {said} is its {key}"
    if said_by:
        words = ", ".join(f"{key} {said}" for key, said in said_by.items())
        return 0, f"it says {words}: steps are counted from 0"
    return 0, "it does not say how many steps were made: they are counted from 0"


def epoch_in(values: Mapping[str, Any]) -> int | float | None:
    """Return the epoch that a checkpoint names, whatever it means by that."""
    state = values.get("trainer_state")
    for where in (values, state if isinstance(state, dict) else {}):
        said = where.get("epoch", where.get("current_epoch"))
        if isinstance(said, int | float) and not isinstance(said, bool):
            return said
    return None


def _below(values: Mapping[str, Any], where: str, depth: int) -> Iterator[Entry]:
    for key, value in values.items():
        name = f"{where}.{key}" if where else key
        for place, item in _items(name, value):
            kind = _kind(item)
            # Deeper down, numbers of their own are scores and counters.
            if kind == "model" and depth and not any(map(_has_dimensions, item.values())):
                continue
            if kind is not None:
                yield Entry(name=place, kind=kind, value=item)
            elif depth < _DEEPEST:
                yield from _below(item, place, depth + 1)


def _items(name: str, value: Any) -> list[tuple[str, dict[str, Any]]]:
    """Return the dictionary that `value` is, or those in a list; a single one is called like the list."""
    if isinstance(value, dict):
        return [(name, value)]
    found = [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []
    return [(f"{name}.{index}" if len(found) > 1 else name, item) for index, item in enumerate(found)]


def _kind(value: Mapping[str, Any]) -> Kind | None:
    groups = value.get("param_groups")
    if isinstance(value.get("state"), dict) and isinstance(groups, list):
        return "optimizer"
    if value.keys() >= _SCALER:
        return "scaler"
    if type(value.get("last_epoch")) is int and not _SCHEDULER.isdisjoint(value):
        return "scheduler"
    # A chain of them counts nothing itself.
    chained = value.get("_schedulers")
    if isinstance(chained, list) and chained and all(isinstance(one, dict) for one in chained):
        return "scheduler"
    return "model" if _is_model(value) else None


def _is_model(value: Mapping[str, Any]) -> bool:
    tensors = [item for item in value.values() if isinstance(item, TensorSource)]
    return any(tensor.dtype != _BYTES for tensor in tensors) and all(
        isinstance(item, TensorSource) or name.endswith(_EXTRA_STATE) for name, item in value.items()
    )


def _has_dimensions(item: object) -> bool:
    return isinstance(item, TensorSource) and bool(item.shape)


def _bare(name: str) -> str:
    """Return the name of a part without what scripts add: `optimizer_states` is of `optimizer`."""
    ending = next((ending for ending in _ENDINGS if name.endswith(ending) and name != ending), "")
    return name.removesuffix(ending)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 53


def _several(part: str, entries: Sequence[Entry]) -> UsageError:
    names = ", ".join(entry.name for entry in entries)
    return UsageError(
        f"Run: start_from=: expected one state for {part!r}, found {names}",
        hint=f"say which is meant, rename={{{entries[0].name!r}: {part!r}}}, and name the others in allow=",
    )
