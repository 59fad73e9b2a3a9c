"""Ways out that the user named and that stand for nothing: a slip of the pen, most likely."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from unbroken.checkpoint.manifest import Manifest
from unbroken.checkpoint.store import Checkpoint
from unbroken.errors import UsageError
from unbroken.state.choices import Choices, matches
from unbroken.state.handlers import ListsSettings, OverridesSettings, Setting, StateHandler
from unbroken.training.adaptation import adapt
from unbroken.training.part import Part


def idle_rules(
    checkpoint: Checkpoint, handlers: Mapping[str, StateHandler], rename: Mapping[Any, str]
) -> list[str]:
    """Return the names in `rename` without which the same names would come out."""
    if not rename:
        return []
    whole = adapt(checkpoint, handlers, rename).manifest
    found = []
    for name in rename:
        others = {old: new for old, new in rename.items() if old is not name}
        try:
            if adapt(checkpoint, handlers, others).manifest == whole:
                found.append(str(getattr(name, "pattern", name)))
        except UsageError:
            # Without it two things would have one name.
            continue
    return found


def idle_patterns(
    parts: Sequence[Part], choices: Choices, manifest: Manifest, changed: Iterable[str]
) -> list[str]:
    """Return the patterns of `override` that fit no setting and have not been told before.

    `changed` are the names of settings that the script changed.
    """
    known = {*_known(parts), *changed}
    told = manifest.choices.get("override", {})
    closed = [part.name for part in parts if _is_closed(part.handler)]
    return [
        pattern
        for pattern in choices.override
        if pattern not in told
        and not any(matches(name, [pattern]) for name in known)
        and not any(matches(part, [pattern.partition(".")[0]]) for part in closed)
    ]


def told(parts: Sequence[Part], rules: Sequence[str], patterns: Sequence[str]) -> list[Setting]:
    """Return a line for each of them."""
    known = ", ".join(dict.fromkeys(_known(parts))) or "none"
    lines = {rule: f"{rule!r} of rename= changes no name in the checkpoint" for rule in rules}
    lines |= {
        pattern: f"{pattern!r} of override= stands for no setting; there are {known}" for pattern in patterns
    }
    return [Setting(name, None, None, note=line) for name, line in lines.items()]


def _known(parts: Sequence[Part]) -> list[str]:
    return [f"{part.name}.{setting.key}" for part in parts for setting in part.script_settings()]


def _is_closed(handler: object) -> bool:
    """Tell whether `handler` has settings that it does not list, so that any name might be one."""
    return isinstance(handler, OverridesSettings) and not isinstance(handler, ListsSettings)
