"""What the user chose for where a restore cannot be exact, and what to keep beyond the usual."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from unbroken.state.handlers import Horizon


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """The explicit ways out of strictness. Patterns have `*` and `?`, and are of names as `part.name`.

    `rename` maps what the checkpoint calls something to what the program calls it. `allow` are names that
    may be missing on either side, or differ in shape; `cast` those that may differ in dtype; `fresh` are
    parts that begin as the script built them. `override` are settings for which the script's value wins,
    `horizon` says what becomes of a schedule whose length has changed. `non_persistent` are buffers to
    keep that a module's state_dict leaves out. `non_finite` are trained tensors that may hold NaN or
    infinity.
    """

    rename: Mapping[Any, str] = field(default_factory=dict)
    allow: tuple[str, ...] = ()
    fresh: tuple[str, ...] = ()
    cast: tuple[str, ...] = ()
    override: tuple[str, ...] = ()
    horizon: Horizon | None = None
    non_persistent: tuple[str, ...] = ()
    non_finite: tuple[str, ...] = ()

    def noted(self, classes: Mapping[str, str]) -> dict[str, Any]:
        """Return what checkpoints note of these choices, so that each is made once, not at every restart.

        `classes` are those of the parts: another one that is called the same is another choice.
        """
        made = {
            "fresh": {part: classes[part] for part in sorted(self.fresh)},
            "rename": {str(old): new for old, new in self.rename.items()},
        }
        return {key: value for key, value in made.items() if value}

    def still_to_rename(self, noted: Mapping[str, Any]) -> dict[Any, str]:
        """Return the part of `rename` that a checkpoint with the notes `noted` was not written under."""
        done = noted.get("rename", {})
        return {old: new for old, new in self.rename.items() if done.get(str(old)) != new}

    def overrides(self, name: str) -> bool:
        """Tell whether the script's value of the setting `name`, such as `optimizer.lr`, wins."""
        return matches(name, self.override)


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Tell whether one of `patterns` stands for `name`."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
