"""How large tensors are, as a picture: a rectangle for each, inside those of what it belongs to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from unbroken.dashboard import words
from unbroken.dashboard.branches import Branch, Item, count_in, merged
from unbroken.dashboard.squarified import Box, squarified
from unbroken.dashboard.tensor_tree import printed

_WIDTH, _HEIGHT = 1000.0, 440.0
# What is smaller than this is drawn together with its neighbours: at most some thousands of rectangles.
_LEAST_AREA = _WIDTH * _HEIGHT / 2000
_COLOURS = 9
_LETTER, _LINE, _MARGIN = 6.7, 14.0, 4.0
_EDGE, _THINNEST = 2.0, 6.0
# A branch has its name above it, if it is as large as this.
_NAMED_WIDTH, _NAMED_HEIGHT = 60.0, 50.0


class _Drawn(NamedTuple):
    """Something with an area: `dtype` is that of most of its bytes, `inside` what is drawn in it."""

    name: str
    size_bytes: int
    dtype: str
    tells: str
    inside: Branch | None = None


def treemap(root: Branch) -> str:
    """Return the picture in SVG, with a legend of dtypes; nothing if there are no bytes."""
    if not root.size_bytes:
        return ""
    dtypes = sorted(root.dtypes, key=lambda dtype: (-root.dtypes[dtype], dtype))
    colours = {dtype: number % _COLOURS for number, dtype in enumerate(dtypes)}
    drawn = "".join(_inside(root, Box(0.0, 0.0, _WIDTH, _HEIGHT), colours))
    tells = f"{words.several(root.tensors, 'tensor')}, {words.size(root.size_bytes)}, by size and dtype"
    legend = "".join(
        f'<li><i class="swatch d{colours[dtype]}"></i>{printed(dtype)} '
        f"{words.size(root.dtypes[dtype])}, {root.dtypes[dtype] / root.size_bytes:.1%}</li>"
        for dtype in dtypes
    )
    return (
        f'<svg class="map" viewBox="0 0 {_WIDTH:.0f} {_HEIGHT:.0f}" role="img" aria-label="{tells}">'
        f'{drawn}</svg><ul class="legend">{legend}</ul>'
    )


def _inside(branch: Branch, box: Box, colours: Mapping[str, int]) -> Iterator[str]:
    found = _large_ones(branch, box)
    for one, place in zip(found, squarified([one.size_bytes for one in found], box), strict=True):
        # In a sliver nothing would be seen.
        if one.inside is None or min(place.width, place.height) < _THINNEST:
            yield _rectangle(one, place, f"d{colours[one.dtype]}")
            continue
        inner = Box(place.x + _EDGE / 2, place.y + _EDGE / 2, place.width - _EDGE, place.height - _EDGE)
        if place.width >= _NAMED_WIDTH and place.height >= _NAMED_HEIGHT:
            yield _rectangle(one, place, "of")
            inner = Box(inner.x, inner.y + _LINE, inner.width, inner.height - _LINE)
        yield from _inside(one.inside, inner, colours)


def _large_ones(branch: Branch, box: Box) -> list[_Drawn]:
    """Return what lies in a branch, the largest first; what is too small to be seen is one, together."""
    seen, small = [], Branch()
    least_bytes = _LEAST_AREA * branch.size_bytes / (box.width * box.height)
    for name, item in branch.items:
        size_bytes = item.size_bytes if isinstance(item, Branch) else item["size_bytes"]
        if size_bytes >= least_bytes:
            seen.append(_drawn(*merged(name, item), least_bytes))
        else:
            _add(small, item)
    if small.size_bytes:
        seen.append(_together(f"{words.count(small.tensors)} small", small))
    return sorted((one for one in seen if one.size_bytes), key=lambda one: -one.size_bytes)


def _drawn(name: str, item: Item, least_bytes: float) -> _Drawn:
    if not isinstance(item, Branch):
        shape = "x".join(map(str, item["shape"])) or "scalar"
        tells = f"{item['path']}: {item['dtype']}, {shape}, {words.size(item['size_bytes'])}"
        return _Drawn(name, item["size_bytes"], item["dtype"], tells)
    # The name and the edges of a branch take room, in which little is left of a small one.
    inside = item if item.size_bytes >= 4 * least_bytes else None
    return _together(name[:-1] or name, item)._replace(inside=inside)


def _together(name: str, branch: Branch) -> _Drawn:
    dtype = max(branch.dtypes, key=lambda one: branch.dtypes[one])
    several = f"{words.several(branch.tensors, 'tensor')}, {words.size(branch.size_bytes)}"
    return _Drawn(name, branch.size_bytes, dtype, f"{name}: {several}, {', '.join(branch.dtypes)}")


def _add(small: Branch, item: Item) -> None:
    if not isinstance(item, Branch):
        count_in(small, item)
        return
    small.size_bytes += item.size_bytes
    small.tensors += item.tensors
    for dtype, size_bytes in item.dtypes.items():
        small.dtypes[dtype] = small.dtypes.get(dtype, 0) + size_bytes


def _rectangle(one: _Drawn, box: Box, kind: str) -> str:
    """Return a rectangle with its name, where that fits, and its size below."""
    x, y, width, height = (f"{number:.1f}" for number in box)
    tells = f"<title>{printed(one.tells)}</title>" if one.tells else ""
    text = ""
    room = (box.width - 2 * _MARGIN) / _LETTER
    if len(printed(one.name)) <= room and box.height >= _LINE + _MARGIN:
        text = _text(one.name, box, 1)
        size = words.size(one.size_bytes)
        if kind != "of" and len(size) <= room and box.height >= 2 * _LINE + _MARGIN:
            text += _text(size, box, 2)
    return f'<g>{tells}<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height}"/>{text}</g>'


def _text(text: str, box: Box, line: int) -> str:
    x, y = box.x + _MARGIN, box.y + line * _LINE - 2
    return f'<text x="{x:.1f}" y="{y:.1f}">{printed(text)}</text>'
