"""What a script hands to the run, checked and brought into our own form."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from unbroken.errors import UsageError
from unbroken.rundir import layout
from unbroken.rundir.journal import nearest_float
from unbroken.rundir.rehearsal import planned
from unbroken.state.choices import Choices
from unbroken.state.handlers import Horizon
from unbroken.state.table import TensorTable
from unbroken.state.tree import Encoder, Json
from unbroken.training import families
from unbroken.training.configuration import encode_plain

_T = TypeVar("_T")
_EXACT_INT = 2**53


def run_directory(given: str | os.PathLike[str] | None) -> Path:
    """Return the absolute run directory; the argument and the supervisor's must agree.

    A rehearsal never touches either of them: it has a directory of its own.
    """
    plan = planned()
    if plan is not None:
        return Path(plan.directory).resolve()
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


def save_policies(given: Any) -> tuple[Any, ...] | Literal["auto"]:
    if isinstance(given, str):
        if given != "auto":
            raise UsageError(
                f"Run: expected a list of policies for save=, or 'auto', found {given!r}",
                hint='write save="auto", or save=[EveryMinutes(10)]',
            )
        return "auto"
    return policies("save", given)


def policies(keyword: str, given: Any) -> tuple[Any, ...]:
    # A text is a list, too: of letters.
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise UsageError(
            f"Run: expected a list of policies for {keyword}=, found {given!r}",
            hint=f"write {keyword}=[{given!r}]",
        )
    return tuple(given)


def checked(keyword: str, given: _T, allowed: Any, *, hint: str) -> _T:
    """Return `given`, which is to be one of the words of the literal type `allowed`."""
    if given not in get_args(allowed):
        raise UsageError(
            f"Run: expected {keyword} to be one of {get_args(allowed)}, found {given!r}", hint=hint
        )
    return given


def choices(
    parts: Mapping[str, object],
    *,
    rename: Mapping[Any, str] | None,
    horizon: Horizon | None,
    fresh: Iterable[str],
    caller: str = "Run",
    **patterns: Iterable[str],
) -> Choices:
    """Return what a script allows a restore to do; `parts` are those that it has."""
    names = {keyword: _names(caller, keyword, given) for keyword, given in patterns.items()}
    parts_anew = _names(caller, "fresh", fresh)
    for name in parts_anew:
        if name not in parts:
            raise UsageError(
                f"{caller}: expected fresh= to name parts, found {name!r}; there are {', '.join(parts)}",
                hint="a part is what you pass to Run by that keyword",
            )
    if horizon not in (None, *get_args(Horizon)):
        raise UsageError(
            f"{caller}: expected horizon to be one of {get_args(Horizon)}, found {horizon!r}",
            hint="'keep' goes on with the old curve, 'stretch' with the new one, 'hold' with the rate of now",
        )
    named: dict[str, Any] = dict(names)
    return Choices(rename=dict(rename or {}), horizon=horizon, fresh=parts_anew, **named)


def _names(caller: str, keyword: str, given: Any) -> tuple[str, ...]:
    """Return the names in a list, or in anything that yields them, which may do so only once."""
    # A single text is a list of letters, too.
    names = tuple(given) if isinstance(given, Iterable) and not isinstance(given, str) else (None,)
    if not all(isinstance(name, str) for name in names):
        raise UsageError(
            f"{caller}: expected a list of names for {keyword}=, found {given!r}",
            hint=f'write {keyword}=["..."]',
        )
    return names


def plain(value: object, where: str) -> Json:
    """Return `value`, plain data or objects that consist of it, as tagged JSON."""
    return encode_plain(value, where, families.codecs())


def encoded_metrics(values: dict[str, int | float]) -> dict[str, Json]:
    return {name: Encoder(TensorTable()).encode(value, name) for name, value in values.items()}


def numbers(metrics: dict[str, Any]) -> dict[str, int | float]:
    """Return metrics as plain numbers; integers that a float cannot hold exactly become floats."""
    return {name: _number(name, value) for name, value in metrics.items()}


def _number(name: str, value: Any) -> int | float:
    """Return the number in a metric: a plain one, or the element of a tensor, an array or a scalar."""
    item = getattr(value, "detach", lambda: value)()
    if not hasattr(item, "item"):
        # TensorFlow's tensors and variables.
        item = getattr(item, "numpy", lambda: item)()
    if hasattr(item, "item") and math.prod(getattr(item, "shape", ())) == 1:
        item = item.item()
    if isinstance(item, bool) or not isinstance(item, int | float):
        raise UsageError(
            f"metric {name!r}: expected a number, found {type(value).__name__} {_shape(value)}".rstrip(),
            hint="pass a float, an int, or a tensor of one element",
        )
    if isinstance(item, float):
        return float(item)
    # All that read metrics, curves and rankings among them, calculate with floats.
    return int(item) if -_EXACT_INT <= item <= _EXACT_INT else nearest_float(item)


def _shape(value: Any) -> str:
    shape = getattr(value, "shape", None)
    return "" if shape is None else f"of shape {tuple(shape)}"
