"""Tensors as a tree that folds: what lies below one name is behind it, with its size."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from unbroken.dashboard import words

_SEGMENT = re.compile(r"[^/.]*[/.]|[^/.]+")
# A hostile name may have any number of segments; browsers and people have their limits.
_DEEPEST = 16
_MOST_OPEN = 40
# What is shown of numbers, and of those that are counted.
_NUMBERS = ("least", "largest", "mean")
_COUNTED = ("zeros", "denormals", "nans", "infinities")


@dataclass(slots=True)
class _Node:
    """What begins with one name: tensors, and further names, in their order."""

    size_bytes: int = 0
    tensors: int = 0
    not_finite: int = 0
    names: dict[str, _Node] = field(default_factory=dict)
    items: list[tuple[str, _Node | Mapping[str, Any]]] = field(default_factory=list)


def tree(tensors: Sequence[Mapping[str, Any]]) -> str:
    """Return the tree in HTML of rows with `path`, `dtype`, `shape`, `size_bytes`, `aliases`.

    With `numbers`, as `unbroken inspect --values` has them, these stand beside each tensor.
    """
    root = _Node()
    for row in tensors:
        _enter(root, row)
    return f'<ul class="tree">{"".join(_inside(root, root.size_bytes, depth=0))}</ul>'


def is_finite(row: Mapping[str, Any]) -> bool:
    """Tell whether no number of a tensor is NaN or infinite, as far as they have been read."""
    numbers = row.get("numbers")
    return not numbers or not (numbers["nans"] or numbers["infinities"])


def _enter(root: _Node, row: Mapping[str, Any]) -> None:
    segments = _SEGMENT.findall(row["path"]) or [""]
    if len(segments) > _DEEPEST:
        segments[_DEEPEST - 1 :] = ["".join(segments[_DEEPEST - 1 :])]
    node = root
    for segment in segments[:-1]:
        _count(node, row)
        if segment not in node.names:
            node.names[segment] = _Node()
            node.items.append((segment, node.names[segment]))
        node = node.names[segment]
    _count(node, row)
    node.items.append((segments[-1], row))


def _count(node: _Node, row: Mapping[str, Any]) -> None:
    node.size_bytes += row["size_bytes"]
    node.tensors += 1
    node.not_finite += not is_finite(row)


def _inside(node: _Node, total_bytes: int, *, depth: int) -> Iterator[str]:
    for name, item in node.items:
        if not isinstance(item, _Node):
            yield _leaf(name, item)
            continue
        full_name, below = _merged(name, item)
        if not isinstance(below, _Node):
            yield _leaf(full_name, below)
            continue
        is_open = " open" if depth == 0 and len(below.items) <= _MOST_OPEN else ""
        yield f"<li><details{is_open}><summary>{_summary(full_name, below, total_bytes)}</summary><ul>"
        yield from _inside(below, total_bytes, depth=depth + 1)
        yield "</ul></details></li>\n"


def _merged(name: str, item: _Node) -> tuple[str, _Node | Mapping[str, Any]]:
    """Return names that have nothing beside them as one, with what lies below: they need no fold each."""
    below: _Node | Mapping[str, Any] = item
    while isinstance(below, _Node) and len(below.items) == 1:
        inner, below = below.items[0]
        name += inner
    return name, below


def _summary(name: str, node: _Node, total_bytes: int) -> str:
    share = 100 * node.size_bytes / total_bytes if total_bytes else 0
    bad = f'<strong class="bad">{node.not_finite} not finite</strong>' if node.not_finite else ""
    return (
        f"<code>{printed(name[:-1] or name)}</code>{bad}<span>{words.several(node.tensors, 'tensor')}</span>"
        f"<span>{words.size(node.size_bytes)}</span>"
        f'<span class="share"><i style="width:{share:.2f}%"></i></span>'
    )


def _leaf(name: str, row: Mapping[str, Any]) -> str:
    shape = "x".join(map(str, row["shape"])) or "scalar"
    also = f"<small>also {printed(', '.join(row['aliases']))}</small>" if row["aliases"] else ""
    cells = "".join(f"<span>{text}</span>" for text in (escape(row["dtype"]), shape))
    return (
        f"<li class=one><code>{printed(name)}</code>{also}{cells}<span>{words.size(row['size_bytes'])}</span>"
        f"{_numbers(row)}</li>\n"
    )


def _numbers(row: Mapping[str, Any]) -> str:
    numbers = row.get("numbers")
    if not numbers:
        return ""
    said = [f"{key} {words.value(numbers[key])}" for key in _NUMBERS if numbers[key] is not None]
    said += [f"{key} {words.count(numbers[key])}" for key in _COUNTED if numbers[key]]
    tone = "" if is_finite(row) else ' class="bad"'
    return f"<em{tone}>{', '.join(said)}</em>"


def printed(text: str) -> str:
    """Return `text` for a page: what would be markup, or would not print but obey, is shown as it is."""
    return escape(text if text.isprintable() else repr(text)[1:-1])
