"""The paths of tensors as a tree: what lies below one name, how many and how large they are."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

_SEGMENT = re.compile(r"[^/.]*[/.]|[^/.]+")
# A hostile name may have any number of segments; browsers and people have their limits.
_DEEPEST = 16


@dataclass(slots=True)
class Branch:
    """What begins with one name: tensors, and further names, in their order.

    `dtypes` has the bytes of each; `not_finite` counts tensors whose numbers are read and not all finite.
    """

    size_bytes: int = 0
    tensors: int = 0
    not_finite: int = 0
    dtypes: dict[str, int] = field(default_factory=dict)
    names: dict[str, Branch] = field(default_factory=dict)
    items: list[tuple[str, Item]] = field(default_factory=list)


# A row of a tensor is at the end of each branch.
Item: TypeAlias = "Branch | Mapping[str, Any]"


def branches(rows: Sequence[Mapping[str, Any]]) -> Branch:
    """Return the tree of rows with `path`, `dtype` and `size_bytes`, and maybe with `numbers`."""
    root = Branch()
    for row in rows:
        _enter(root, row)
    return root


def merged(name: str, item: Item) -> tuple[str, Item]:
    """Return names that have nothing beside them as one, with what lies below: they need no branch each."""
    while isinstance(item, Branch) and len(item.items) == 1:
        inner, item = item.items[0]
        name += inner
    return name, item


def is_finite(row: Mapping[str, Any]) -> bool:
    """Tell whether no number of a tensor is NaN or infinite, as far as they have been read."""
    numbers = row.get("numbers")
    return not numbers or not (numbers["nans"] or numbers["infinities"])


def _enter(root: Branch, row: Mapping[str, Any]) -> None:
    segments = _SEGMENT.findall(row["path"]) or [""]
    if len(segments) > _DEEPEST:
        segments[_DEEPEST - 1 :] = ["".join(segments[_DEEPEST - 1 :])]
    branch = root
    for segment in segments[:-1]:
        count_in(branch, row)
        if segment not in branch.names:
            branch.names[segment] = Branch()
            branch.items.append((segment, branch.names[segment]))
        branch = branch.names[segment]
    count_in(branch, row)
    branch.items.append((segments[-1], row))


def count_in(branch: Branch, row: Mapping[str, Any]) -> None:
    """Add a tensor to what a branch counts."""
    branch.size_bytes += row["size_bytes"]
    branch.tensors += 1
    branch.not_finite += not is_finite(row)
    branch.dtypes[row["dtype"]] = branch.dtypes.get(row["dtype"], 0) + row["size_bytes"]
