"""What of a checkpoint fits the live parts, what does not, and what of that the user allows. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

from unbroken.checkpoint.manifest import Manifest
from unbroken.state.choices import Choices, matches
from unbroken.state.handlers import Difference, DifferenceKind
from unbroken.state.paths import part_of
from unbroken.state.tensors import TensorSource, size_bytes
from unbroken.state.tree import join

_ALLOWABLE = frozenset({"missing", "unexpected", "shape"})


@dataclass(frozen=True, slots=True)
class Amount:
    """How many tensors, and their size."""

    tensors: int = 0
    size_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """A checkpoint that another run or library wrote: what it is `called` in errors.

    `beside` are, by part, the differences that were found beside those that a handler sees.
    """

    called: str
    beside: Mapping[str, Sequence[Difference]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartReport:
    """What became of one part.

    `matched` was restored; `allowed` are the differences that the user allowed, and `differing` how much
    they amount to, by kind: "missing" in the checkpoint, "unexpected" in it, another "shape" or "dtype".
    A part that `is_fresh` began as the script built it.
    """

    handler: str
    is_fresh: bool = False
    matched: Amount = Amount()
    differing: Mapping[str, Amount] = field(default_factory=dict)
    allowed: tuple[Difference, ...] = ()

    @property
    def is_exact(self) -> bool:
        """True if all of the part is as in the checkpoint."""
        return not self.is_fresh and not self.allowed


def is_allowed(part: str, difference: Difference, choices: Choices) -> bool:
    """Tell whether the user allows that `part` differs like this."""
    names = {part, f"{part}.{difference.name}" if difference.name else part, difference.name or part}
    if difference.kind in _ALLOWABLE:
        return any(matches(name, choices.allow) for name in names)
    return difference.kind == "dtype" and any(matches(name, choices.cast) for name in names)


def begins_fresh(part: str, class_name: str, manifest: Manifest, choices: Choices) -> bool:
    """Tell whether `part` begins as the script built it: once for each class, not at every restart."""
    return part in choices.fresh and manifest.choices.get("fresh", {}).get(part) != class_name


def part_report(
    part: str,
    handler: str,
    manifest: Manifest,
    live: Mapping[str, TensorSource],
    differences: Sequence[Difference],
    *,
    below: str = "",
) -> PartReport:
    """Return the report on a part that differs by `differences`, all allowed.

    The tensors for the name of a difference stand `below` that path of the part.
    """
    sizes = {
        path: size_bytes(source.dtype, source.shape) for path, source in live.items() if _is_of(part, path)
    }
    kept = {path: entry.size_bytes for path, entry in manifest.tensors.items() if _is_of(part, path)}
    sizes |= kept
    apart = _concerned(part, below, (item for item in differences if item.kind != "dtype"), kept)
    differing = {}
    for kind in get_args(DifferenceKind):
        found = [item for item in differences if item.kind == kind]
        if found:
            paths = _concerned(part, below, found, sizes)
            differing[kind] = Amount(len(paths), sum(sizes[path] for path in paths))
    return PartReport(
        handler=handler,
        matched=Amount(len(kept) - len(apart), sum(kept[path] for path in kept.keys() - apart)),
        differing=differing,
        allowed=tuple(differences),
    )


def nothing_matches(part: str, report: PartReport, manifest: Manifest) -> bool:
    """Tell whether the checkpoint has tensors for `part` and none of them would be restored."""
    if any(not difference.name for difference in report.allowed):
        # The user named the part itself.
        return False
    has_any = any(_is_of(part, path) for path in manifest.tensors)
    return has_any and not report.matched.tensors


def place_of(part: str, below: str, difference: Difference) -> str:
    """Return the path at or below which the tensors that `difference` is about stand."""
    if not difference.name:
        return part
    return join(f"{part}/{below}" if below else part, difference.name)


def lies_in(path: str, places: Collection[str]) -> bool:
    """Tell whether `path` is one of `places`, or stands below one."""
    while path:
        if path in places:
            return True
        path = path.rpartition("/")[0]
    return False


def _is_of(part: str, path: str) -> bool:
    return part_of(path) == part


def _concerned(part: str, below: str, differences: Iterable[Difference], paths: Iterable[str]) -> set[str]:
    places = {place_of(part, below, difference) for difference in differences}
    return {path for path in paths if lies_in(path, places)}


def as_json(report: PartReport) -> dict[str, Any]:
    """Return the report as plain values, for machines."""
    counts = {"matched": report.matched, **report.differing}
    return {
        "handler": report.handler,
        "fresh": report.is_fresh,
        **{kind: {"tensors": amount.tensors, "bytes": amount.size_bytes} for kind, amount in counts.items()},
        "allowed": [str(difference) for difference in report.allowed],
    }
