"""Tensors as a tree that folds: what lies below one name is behind it, with its size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from unbroken.dashboard import words
from unbroken.dashboard.branches import Branch, is_finite, merged

_MOST_OPEN = 40
# What is shown of numbers, and of those that are counted.
_NUMBERS = ("least", "largest", "mean")
_COUNTED = ("zeros", "denormals", "nans", "infinities")
# A bin that is not empty is seen.
_BARS_HEIGHT, _LEAST_BAR = 16, 0.5


def tree(root: Branch) -> str:
    """Return the tree in HTML of rows with `path`, `dtype`, `shape`, `size_bytes`, `aliases`.

    With `numbers`, as `unbroken inspect --values` has them, these stand beside each tensor, and with
    `histogram`, the counts of its bins, a picture of it.
    """
    return f'<ul class="tree">{"".join(_inside(root, root.size_bytes, depth=0))}</ul>'


def _inside(node: Branch, total_bytes: int, *, depth: int) -> Iterator[str]:
    for name, item in node.items:
        if not isinstance(item, Branch):
            yield _leaf(name, item)
            continue
        full_name, below = merged(name, item)
        if not isinstance(below, Branch):
            yield _leaf(full_name, below)
            continue
        is_open = " open" if depth == 0 and len(below.items) <= _MOST_OPEN else ""
        yield f"<li><details{is_open}><summary>{_summary(full_name, below, total_bytes)}</summary><ul>"
        yield from _inside(below, total_bytes, depth=depth + 1)
        yield "</ul></details></li>\n"


def _summary(name: str, node: Branch, total_bytes: int) -> str:
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
    return f"<em{tone}>{_histogram(row)}{', '.join(said)}</em>"


def _histogram(row: Mapping[str, Any]) -> str:
    counts = row.get("histogram")
    if not counts:
        return ""
    most, numbers = max(counts), row["numbers"]
    bars = "".join(
        f"M{index} {_BARS_HEIGHT}v-{max(_LEAST_BAR, _BARS_HEIGHT * count / most):.1f}h1V{_BARS_HEIGHT}z"
        for index, count in enumerate(counts)
        if count
    )
    tells = (
        f"{len(counts)} bins from {words.value(numbers['least'])} to {words.value(numbers['largest'])}, "
        f"up to {words.count(most)} in one"
    )
    return (
        f'<svg class="histogram" viewBox="0 0 {len(counts)} {_BARS_HEIGHT}" preserveAspectRatio="none" '
        f'role="img"><title>{tells}</title><path d="{bars}"/></svg>'
    )


def printed(text: str) -> str:
    """Return `text` for a page: what would be markup, or would not print but obey, is shown as it is."""
    return escape(text if text.isprintable() else repr(text)[1:-1])
