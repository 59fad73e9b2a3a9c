"""What classes are called in checkpoints: without modules, which Keras and scripts may move."""

from __future__ import annotations

from unbroken.state.handlers import Difference


def class_name(value: object) -> str:
    """Return the name of the class of `value`, which begins with `keras.` for those of Keras."""
    cls = type(value)
    is_of_keras = cls.__module__.partition(".")[0] == "keras"
    return f"keras.{cls.__qualname__}" if is_of_keras else cls.__qualname__


def class_differences(value: object, saved: str, name: str = "") -> list[Difference]:
    """Return why `value`, called `name`, is not of the class that the checkpoint has."""
    mine = class_name(value)
    if mine == saved:
        return []
    return [Difference("other", name, f"class {mine}, the checkpoint has class {saved}")]
