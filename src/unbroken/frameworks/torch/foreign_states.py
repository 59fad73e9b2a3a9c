"""States in the form of torch, as files have them, in the form that our handlers have states in.

What comes of it is compared and restored like a checkpoint of our own. What such a comparison could not see,
for it trusts in the class of the object, is looked at here: that an optimizer would keep the same moments,
that a scheduler has the same settings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from unbroken.frameworks.torch.foreign_modules import module_state
from unbroken.frameworks.torch.foreign_optimizers import optimizer_state
from unbroken.frameworks.torch.foreign_values import UnlikeError, like, state_like
from unbroken.state.handlers import Difference, StateHandler


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignState:
    """The state of a part, None if no state of its kind is in such files; `notes` say what was assumed."""

    state: Any
    differences: list[Difference] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def foreign_state(
    handler: StateHandler, value: Any, found: Any, new_name: Callable[[str], str]
) -> ForeignState:
    """Return what `found`, the state that a file has, is for `value`; nothing is changed.

    `new_name` gives what an entry of a module's state_dict is called here, by the user's map.
    """
    live: Any = handler.state(value)
    if handler.name == "torch.module" and isinstance(found, dict):
        state, differences, notes = module_state(live, found, new_name)
        return ForeignState(state=state, differences=differences, notes=notes)
    if handler.name == "torch.optimizer" and isinstance(found, dict):
        state, differences, notes = optimizer_state(value, live, found)
        return ForeignState(state=state, differences=differences, notes=notes)
    if handler.name == "torch.scheduler" and isinstance(found, dict):
        state, differences = state_like(live["state"], found)
        differences += _rates(live["state"], state)
        return ForeignState(state={"class": live["class"], "state": state}, differences=differences)
    if handler.name == "python.state_dict" and isinstance(live, dict) and isinstance(found, dict):
        # One of both is empty where only one is enabled, which the handler tells.
        state, differences = state_like(live, found) if live and found else (found, [])
        return ForeignState(state=state, differences=differences)
    if handler.name in ("python.container", "torch.tensor"):
        try:
            return ForeignState(state=like(live, found, ""))
        except UnlikeError as error:
            return ForeignState(state=live, differences=[Difference("other", error.where, error.text)])
    if isinstance(found, dict) or not isinstance(live, dict):
        return ForeignState(state=None)
    text = f"a state of {type(value).__name__} here, the checkpoint has a {type(found).__name__}"
    return ForeignState(state=live, differences=[Difference("other", "", text)])


def _rates(live: Mapping[str, Any], state: Mapping[str, Any]) -> list[Difference]:
    """Return where a scheduler of a file has the rates of another number of parameter groups."""
    found = []
    for key in ("base_lrs", "_last_lr"):
        mine, theirs = live.get(key), state.get(key)
        if isinstance(mine, list) and isinstance(theirs, list) and len(mine) != len(theirs):
            text = f"the rates of {len(mine)} parameter groups, the checkpoint has {len(theirs)}"
            found.append(Difference("other", key, text))
    return found
