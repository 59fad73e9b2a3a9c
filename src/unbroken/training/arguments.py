"""What a script hands to the run, checked and brought into our own form."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from unbroken.errors import UsageError
from unbroken.rundir import layout
from unbroken.state.choices import Choices
from unbroken.state.handlers import Horizon
from unbroken.state.tree import Encoder, Json, TensorTable
from unbroken.training import families
from unbroken.training.configuration import encode_plain


def run_directory(given: str | os.PathLike[str] | None) -> Path:
    """Return the absolute run directory; the argument and the supervisor's must agree."""
    supervised = os.environ.get(layout.RUN_DIR_VARIABLE)
    if given is None and supervised is None:
        raise UsageError(
            f"Run: expected a run directory as first argument or in {layout.RUN_DIR_VARIABLE}, found neither",
            hint='write unbroken.Run("runs/my-run", ...), or start the script by `unbroken run`',
        )
    chosen = Path(supervised if given is None else given).expanduser().resolve()  # type: ignore[arg-type]
    if supervised is not None and Path(supervised).resolve() != chosen:
        raise UsageError(
            f"Run: expected the run directory {supervised} of `unbroken run`, found {chosen} in the script",
            hint=f"start it by `unbroken run --run-dir {given} -- ...`, or leave it out of Run(...)",
        )
    return chosen


def policies(keyword: str, given: Any) -> tuple[Any, ...]:
    if not isinstance(given, Sequence):
        raise UsageError(
            f"Run: expected a list of policies for {keyword}=, found {given!r}",
            hint=f"write {keyword}=[{given!r}]",
        )
    return tuple(given)


def choices(
    parts: Mapping[str, object],
    *,
    rename: Mapping[Any, str] | None,
    horizon: Horizon | None,
    fresh: Sequence[str],
    **patterns: Sequence[str],
) -> Choices:
    """Return what a script allows a restore to do; `parts` are those that it has."""
    for keyword, given in {"fresh": fresh, **patterns}.items():
        # Anything but text in a list: a single text is a list of letters, too.
        if isinstance(given, str) or not all(isinstance(name, str) for name in given):
            raise UsageError(
                f"Run: expected a list of names for {keyword}=, found {given!r}",
                hint=f'write {keyword}=["..."]',
            )
    for name in fresh:
        if name not in parts:
            raise UsageError(
                f"Run: expected fresh= to name parts, found {name!r}; there are {', '.join(parts)}",
                hint="a part is what you pass to Run by that keyword",
            )
    if horizon not in (None, *get_args(Horizon)):
        raise UsageError(
            f"Run: expected horizon to be one of {get_args(Horizon)}, found {horizon!r}",
            hint="'keep' goes on with the old curve, 'stretch' with the new one, 'hold' with the rate of now",
        )
    named: dict[str, Any] = {keyword: tuple(given) for keyword, given in patterns.items()}
    return Choices(rename=dict(rename or {}), horizon=horizon, fresh=tuple(fresh), **named)


def plain(value: object, where: str) -> Json:
    """Return `value`, plain data or objects that consist of it, as tagged JSON."""
    return encode_plain(value, where, families.codecs())


def encoded_metrics(values: dict[str, int | float]) -> dict[str, Json]:
    return {name: Encoder(TensorTable()).encode(value, name) for name, value in values.items()}


def numbers(metrics: dict[str, Any]) -> dict[str, int | float]:
    return {name: _number(name, value) for name, value in metrics.items()}


def _number(name: str, value: Any) -> int | float:
    """Return the number in a metric: a plain one, or the element of a tensor, an array or a scalar."""
    item = getattr(value, "detach", lambda: value)()
    if hasattr(item, "item") and math.prod(getattr(item, "shape", ())) == 1:
        item = item.item()
    if isinstance(item, bool) or not isinstance(item, int | float):
        raise UsageError(
            f"metric {name!r}: expected a number, found {type(value).__name__} {_shape(value)}".rstrip(),
            hint="pass a float, an int, or a tensor of one element",
        )
    return item


def _shape(value: Any) -> str:
    shape = getattr(value, "shape", None)
    return "" if shape is None else f"of shape {tuple(shape)}"
