"""What classes are called in checkpoints, and which of them are the same one."""

from __future__ import annotations

from unbroken.state.handlers import Difference, Setting


def class_name(value: object) -> str:
    """Return the full name of the class of `value`."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def class_differences(value: object, saved: str) -> list[Difference]:
    """Return why `value` is not of the class that the checkpoint has."""
    if _is_the_same(value, saved):
        return []
    return [Difference("other", "", f"class {class_name(value)}, the checkpoint has class {saved}")]


def moved_class(value: object, saved: str) -> list[Setting]:
    """Return a line if the class of `value` is in another module than it was."""
    mine = class_name(value)
    if mine == saved:
        return []
    note = f"class {mine}: taken for {saved} of the checkpoint, moved to another module"
    return [Setting("class", saved, mine, note=note, places=("class",))]


def _is_the_same(value: object, saved: str) -> bool:
    # A script is `__main__` when it is run, and users move their classes; none of those becomes torch's.
    mine = class_name(value)
    is_called_so = f".{saved}".endswith(f".{type(value).__qualname__}")
    return mine == saved or (is_called_so and _is_of_torch(mine) == _is_of_torch(saved))


def _is_of_torch(name: str) -> bool:
    return name.startswith("torch.")
