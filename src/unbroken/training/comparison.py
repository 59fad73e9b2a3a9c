"""What of a checkpoint fits the live parts, what does not, and what of that the user allows. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

from unbroken.checkpoint.manifest import Manifest
from unbroken.state.choices import Choices, matches
from unbroken.state.handlers import Difference, DifferenceKind
from unbroken.state.tensors import TensorSource, size_bytes
from unbroken.state.tree import join

_ALLOWABLE = frozenset({"missing", "unexpected", "shape"})


@dataclass(frozen=True, slots=True)
class Amount:
    """How many tensors, and their size."""

    tensors: int = 0
    size_bytes: int = 0


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


def begins_fresh(part: str, manifest: Manifest, choices: Choices) -> bool:
    """Tell whether `part` begins as the script built it: once, not again at every restart."""
    return part in choices.fresh and part not in manifest.choices.get("fresh", ())


def part_report(
    part: str,
    handler: str,
    manifest: Manifest,
    live: Mapping[str, TensorSource],
    differences: Sequence[Difference],
) -> PartReport:
    """Return the report on a part that differs by `differences`, all allowed."""
    kept = {path: entry for path, entry in manifest.tensors.items() if path.partition("/")[0] == part}
    apart = {join(part, difference.name) for difference in differences if difference.kind != "dtype"}
    matched = {path: entry for path, entry in kept.items() if path not in apart}
    differing = {}
    for kind in get_args(DifferenceKind):
        paths = [join(part, difference.name) for difference in differences if difference.kind == kind]
        sizes = [
            kept[path].size_bytes if path in kept else size_bytes(live[path].dtype, live[path].shape)
            for path in paths
            if path in kept or path in live
        ]
        if paths:
            differing[kind] = Amount(len(paths), sum(sizes))
    return PartReport(
        handler=handler,
        matched=Amount(len(matched), sum(entry.size_bytes for entry in matched.values())),
        differing=differing,
        allowed=tuple(differences),
    )


def nothing_matches(part: str, report: PartReport, manifest: Manifest) -> bool:
    """Tell whether the checkpoint has tensors for `part` and none of them would be restored."""
    has_any = any(path.partition("/")[0] == part for path in manifest.tensors)
    return has_any and not report.matched.tensors


def as_json(report: PartReport) -> dict[str, Any]:
    """Return the report as plain values, for machines."""
    counts = {"matched": report.matched, **report.differing}
    return {
        "handler": report.handler,
        "fresh": report.is_fresh,
        **{kind: {"tensors": amount.tensors, "bytes": amount.size_bytes} for kind, amount in counts.items()},
        "allowed": [str(difference) for difference in report.allowed],
    }
