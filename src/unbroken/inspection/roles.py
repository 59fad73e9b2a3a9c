"""What the values of a checkpoint are for: optimizers, schedulers and counters, by the keys everyone uses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from unbroken.inspection.formats.base import CheckpointReader

# How deep training states nest these: {"optimizers": [{...}]}, {"state": {"optimizer": {...}}}.
_DEEPEST = 4
_GROUPS = ("param_groups", "groups")
# Of Adam and what is like it, of momentum, and of root mean squares.
_OF_OPTAX = ("mu", "nu", "nu_max", "trace")
_COUNTERS = frozenset(
    {
        "epoch",
        "epochs",
        "current_epoch",
        "step",
        "steps",
        "global_step",
        "global_steps",
        "iteration",
        "iter",
        "iter_num",
        "num_updates",
    }
)
# What data-parallel training, compilation and sharding put before the names of a model's parameters.
WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


def optimizers(values: Any) -> list[dict[str, Any]]:
    """Return the states of optimizers: where each is, its groups and rates, how many parameters have one.

    `moments` are the names of what is kept for a parameter, `exp_avg` for example.
    """
    return [
        _optimizer(where, found) if _is_optimizer(found) else _optax(where, found)
        for where, found in _mappings(values)
        if _is_optimizer(found) or _is_optax(found)
    ]


def optimizers_in(reader: CheckpointReader) -> list[dict[str, Any]]:
    """Return the same for a checkpoint, which may say by other means than values what its optimizers keep."""
    return [*optimizers(reader.values), *reader.facts.get("optimizers", [])]


def parameter_keys(values: Any) -> dict[str, list[str]]:
    """Return, by the place of each optimizer, the names or numbers of its parameters in their order."""
    return {
        where: [str(key) for group in _groups(found) or [] for key in group["params"]]
        for where, found in _mappings(values)
        if _is_optimizer(found)
    }


def paired(here: Iterable[str], there: Iterable[str]) -> dict[str, str]:
    """Return the place of each optimizer in one checkpoint with that of its partner in another.

    It is the one of the same place, or else the next that has no such partner; some may have none.
    """
    first, second = list(here), list(there)
    strangers = (place for place in second if place not in first)
    found = {place: place if place in second else next(strangers, None) for place in first}
    return {place: partner for place, partner in found.items() if partner is not None}


def schedulers(values: Any) -> list[dict[str, Any]]:
    """Return the states of schedulers: where each is, and the counters and rates it keeps."""
    kept = ("last_epoch", "_step_count", "_last_lr", "base_lrs")
    return [
        {"where": where, **{key: found[key] for key in kept if key in found}}
        for where, found in _mappings(values)
        if isinstance(found.get("last_epoch"), int)
    ]


def counters(values: Any) -> dict[str, int | float]:
    """Return what the usual keys for steps and epochs say, by where they stand: at the top or one below."""
    found: dict[str, int | float] = {}
    for where, mapping in _mappings(values, deepest=1):
        for key, value in mapping.items():
            if key in _COUNTERS and isinstance(value, int | float) and not isinstance(value, bool):
                found[f"{where}/{key}" if where else key] = value
    return found


def wrappers(paths: Iterable[str]) -> dict[str, int]:
    """Return how many tensors have a name with each of the prefixes that wrappers put before it."""
    found: Counter[str] = Counter()
    for path in paths:
        # Looked for in the whole first: most names have none.
        for wrapper in WRAPPERS:
            if wrapper in path and wrapper in path.rpartition("/")[2].split("."):
                found[f"{wrapper}."] += 1
    return dict(found)


def _mappings(
    value: Any, where: str = "", *, depth: int = 0, deepest: int = _DEEPEST
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the dictionaries in a value, each with where it stands."""
    if isinstance(value, dict):
        yield where, value
    if depth == deepest:
        return
    # The state of one class may hold that of another.
    items = enumerate(value) if isinstance(value, list) else value.items() if isinstance(value, dict) else ()
    for key, item in items:
        if isinstance(item, dict | list) and not _is_reference(item):
            inner = f"{where}/{key}" if where else str(key)
            yield from _mappings(item, inner, depth=depth + 1, deepest=deepest)


def _is_reference(value: Any) -> bool:
    """Tell whether a value stands for a tensor and nothing else: there are very many."""
    return len(value) == 1 and "$tensor" in value


def _is_optimizer(value: Mapping[str, Any]) -> bool:
    return isinstance(value.get("state"), dict) and _groups(value) is not None


def _groups(value: Mapping[str, Any]) -> list[Mapping[str, Any]] | None:
    for key in _GROUPS:
        groups = value.get(key)
        if isinstance(groups, list) and all(map(_is_group, groups)):
            return groups
    return None


def _is_group(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("params"), list)


def _optimizer(where: str, value: Mapping[str, Any]) -> dict[str, Any]:
    groups = _groups(value) or []
    # Our own groups keep the options apart from the parameters.
    options = [group.get("options", group) for group in groups]
    states = [state for state in value["state"].values() if isinstance(state, dict)]
    return {
        "where": where,
        "groups": len(groups),
        "parameters": sum(len(group["params"]) for group in groups),
        "learning_rates": [
            group["lr"] for group in options if isinstance(group, dict) and _is_plain(group.get("lr"))
        ],
        "states": len(states),
        "moments": sorted({name for state in states for name in state}),
    }


def _is_optax(value: Mapping[str, Any]) -> bool:
    """Tell whether a transformation of Optax keeps this: trees like that of the parameters."""
    moments = [key for key in _OF_OPTAX if key in value]
    return (
        bool(moments) and value.keys() <= {*moments, "count"} and all(_tensors(value[key]) for key in moments)
    )


def _optax(where: str, value: Mapping[str, Any]) -> dict[str, Any]:
    moments = sorted(key for key in _OF_OPTAX if key in value)
    parameters = _tensors(value[moments[0]])
    return {
        "where": where,
        "groups": 1,
        "parameters": parameters,
        "learning_rates": [],
        "states": parameters,
        "moments": moments,
    }


def _tensors(value: Any) -> int:
    """Return how many tensors are in a tree."""
    if isinstance(value, dict):
        return int("$tensor" in value) or sum(map(_tensors, value.values()))
    return sum(map(_tensors, value)) if isinstance(value, list) else 0


def _is_plain(value: Any) -> bool:
    return isinstance(value, int | float)
