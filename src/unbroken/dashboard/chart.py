"""One metric as a picture: its curve, what was superseded, and what happened to the run.

The curve is an SVG that is stretched to whatever room there is; words and marks lie over it as HTML, so that
they are as large on a telephone as on a wide screen.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

from unbroken.dashboard import words
from unbroken.dashboard.axis import Axis, labels, step_axis, value_axis
from unbroken.dashboard.course import Curve
from unbroken.dashboard.report import Mark, SavedState
from unbroken.dashboard.thinned import Point, Thinned

_WIDTH, _HEIGHT = 1000, 300
_MOST_NOT_FINITE = 60
_MOST_CHECKPOINTS = 120
_NAMED_BY_A_PIN = 5
_ROOM_FOR_A_LABEL = 6
# How near to each other pins may stand, as a share of the width: on a wide screen, and on a telephone.
_NEAR = (("wide", 0.05), ("narrow", 0.13))


@dataclass(frozen=True, slots=True)
class Numbered:
    """A mark with the number that it has in the list of all."""

    number: int
    mark: Mark


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """What all charts of a page share; the steps end with `last_step`."""

    last_step: int
    marks: Sequence[Numbered]
    checkpoints: Sequence[SavedState]
    has_pins: bool = True

    @property
    def steps(self) -> Axis:
        return step_axis(self.last_step)


def chart(curve: Curve, scene: Scene, *, spans: int, name: str) -> str:
    """Return the picture of `curve` in at most `spans` spans, as HTML; `name` is said of it."""
    counting = curve.counting.coarser(spans)
    axis = _values(counting, curve.superseded.values())
    if axis is None:
        axis = Axis(low=0.0, high=1.0)
    drawn = "".join((*_grid(axis, scene), *_bands(scene), *_curves(counting, curve, axis, scene)))
    lines = "".join(_lines(scene))
    over = "".join(
        (*_labels(axis, scene), *_not_finite(counting, curve, scene), *_saved(scene), *_pins(scene))
    )
    longest = max(map(len, labels(axis.ticks(5))), default=0)
    # Beyond what there is room for in any case.
    room = f' style="margin-left:{longest / 2 + 1:g}rem"' if longest > _ROOM_FOR_A_LABEL else ""
    return (
        f'<div class="plot"{room}><svg viewBox="0 0 {_WIDTH} {_HEIGHT}" preserveAspectRatio="none" '
        f'role="img" aria-label="{escape(said(curve, name))}">{drawn}{lines}</svg>{over}</div>\n'
    )


def said(curve: Curve, name: str) -> str:
    """Return a curve in a sentence, for those who do not see it."""
    found = [f"{name} by step"]
    for what, point in (("newest", curve.last), *extremes(curve)):
        if point is not None:
            found.append(f"{what} {words.value(point[1])} at step {words.count(point[0])}")
    missing = len(curve.counting.not_finite())
    if missing:
        found.append(f"not finite at {words.several(missing, 'place')}")
    return "; ".join(found)


def extremes(curve: Curve) -> list[tuple[str, tuple[int, float] | None]]:
    """Return the lowest and the highest point of a curve."""
    return [("lowest", curve.counting.low()), ("highest", curve.counting.high())]


def _values(counting: Thinned, superseded: Iterable[Thinned]) -> Axis | None:
    axis = value_axis(value for line in counting.lines() for _, value in line)
    if axis is not None:
        # What was undone may leave the picture: a planted spike must not flatten all the rest.
        return axis
    return value_axis(value for thinned in superseded for line in thinned.lines() for _, value in line)


def _grid(axis: Axis, scene: Scene) -> Iterator[str]:
    for value in axis.ticks(5):
        y = _y(axis, value)
        yield f'<line class="grid" x1="0" x2="{_WIDTH}" y1="{y}" y2="{y}"/>'
    for step in scene.steps.ticks(4):
        x = _x(scene, step)
        yield f'<line class="grid" x1="{x}" x2="{x}" y1="0" y2="{_HEIGHT}"/>'


def _bands(scene: Scene) -> Iterator[str]:
    """Yield the steps that were done again or undone, as areas behind the curve."""
    for kind, start, stop in _spans(one.mark for one in scene.marks):
        x, end = _x(scene, start), _x(scene, stop)
        width = f"{max(1.0, float(end) - float(x)):.1f}"
        yield f'<rect class="band {kind}" x="{x}" y="0" width="{width}" height="{_HEIGHT}"/>'


def _spans(marks: Iterable[Mark]) -> list[tuple[str, int, int]]:
    """Return the steps that marks went back over, each once: areas over each other would hide the curve."""
    found: list[tuple[str, int, int]] = []
    for kind, start, stop in sorted(
        (mark.kind, mark.back_to, mark.step)
        for mark in marks
        if mark.back_to is not None and mark.step is not None and mark.back_to < mark.step
    ):
        if found and found[-1][0] == kind and start <= found[-1][2]:
            found[-1] = kind, found[-1][1], max(stop, found[-1][2])
        else:
            found.append((kind, start, stop))
    return found


def _curves(counting: Thinned, curve: Curve, axis: Axis, scene: Scene) -> Iterator[str]:
    for thinned in curve.superseded.values():
        means = thinned.means()
        lines = [means] if means else thinned.lines()
        yield f'<path class="superseded" d="{_path(lines, axis, scene)}"/>'
    means = counting.means()
    # Of many steps in a pixel the extremes are a broad ribbon: their mean shows where the curve goes.
    kind = "curve range" if means else "curve"
    yield f'<path class="{kind}" d="{_path(counting.lines(), axis, scene)}"/>'
    if means:
        yield f'<path class="curve" d="{_path([means], axis, scene)}"/>'


def _path(lines: Iterable[Sequence[Point]], axis: Axis, scene: Scene) -> str:
    # A piece of one point is a line of no length: its round ends make it a dot.
    return "".join(
        "M"
        + "L".join(f"{_x(scene, step)} {_y(axis, value)}" for step, value in line)
        + (f"L{_x(scene, line[0][0])} {_y(axis, line[0][1])}" if len(line) == 1 else "")
        for line in lines
    )


def _lines(scene: Scene) -> Iterator[str]:
    seen: set[tuple[str, str]] = set()
    for one in scene.marks:
        if one.mark.step is None:
            continue
        place = (one.mark.kind, _x(scene, one.mark.step))
        if place not in seen and one.mark.kind != "end":
            seen.add(place)
            yield (
                f'<line class="mark {one.mark.kind}" x1="{place[1]}" x2="{place[1]}" y1="0" y2="{_HEIGHT}">'
                f"<title>{escape(one.mark.title)}</title></line>"
            )


def _labels(axis: Axis, scene: Scene) -> Iterator[str]:
    ticks = axis.ticks(5)
    for value, label in zip(ticks, labels(ticks), strict=True):
        top = 100 * (1 - axis.share(value))
        yield f'<span class="y" style="top:{top:.1f}%">{escape(label)}</span>'
    for step in scene.steps.ticks(4):
        share = 100 * scene.steps.share(step)
        # The last one must not leave the page.
        place = f"right:{100 - share:.1f}%" if share > 92 else f"left:{share:.1f}%"
        side = " last" if share > 92 else (" first" if step == 0 else "")
        yield f'<span class="x{side}" style="{place}">{words.count(int(step))}</span>'


def _not_finite(counting: Thinned, curve: Curve, scene: Scene) -> Iterator[str]:
    """Yield marks at the upper edge, where values have no place in the picture."""
    undone = [step for thinned in curve.superseded.values() for step in thinned.not_finite()]
    for steps, kind, since in ((undone, " undone", ", superseded since"), (counting.not_finite(), "", "")):
        for step in steps[:: max(1, len(steps) // _MOST_NOT_FINITE)]:
            title = f"NaN or infinite at step {words.count(step)}{since}"
            yield f'<i class="nan{kind}" style="left:{_left(scene, step)}" title="{title}">&#215;</i>'


def _saved(scene: Scene) -> Iterator[str]:
    found = [one for one in scene.checkpoints if one.step is not None]
    for one in found[-_MOST_CHECKPOINTS:]:
        kind = " bad" if one.note or one.is_set_aside else ""
        note = f": {one.note}" if one.note else ""
        yield (
            f'<i class="saved{kind}" style="left:{_left(scene, one.step or 0)}" '
            f'title="{escape(one.name + note)}"></i>'
        )


def _pins(scene: Scene) -> Iterator[str]:
    """Yield links from where something happened to what is said of it; near ones share a pin."""
    if not scene.has_pins:
        return
    placed = [one for one in scene.marks if one.mark.step is not None and one.mark.kind != "end"]
    for screen, near in _NEAR:
        for group in _groups(placed, scene, near):
            first, last = group[0], group[-1]
            kinds = {one.mark.kind for one in group}
            kind = first.mark.kind if len(kinds) == 1 else "several"
            label = str(first.number) if first is last else f"{first.number}+"
            title = "; ".join(one.mark.title for one in group[:_NAMED_BY_A_PIN])
            yield (
                f'<a class="pin {kind} {screen}" href="#mark-{first.number}" '
                f'style="left:{_left(scene, first.mark.step or 0)}" title="{escape(title)}" '
                f'aria-label="{label}: {escape(title)}">{label}</a>'
            )


def _groups(placed: Sequence[Numbered], scene: Scene, near: float) -> list[list[Numbered]]:
    groups: list[list[Numbered]] = []
    for one in sorted(placed, key=lambda one: (one.mark.step or 0, one.number)):
        share = scene.steps.share(one.mark.step or 0)
        if groups and share - scene.steps.share(groups[-1][0].mark.step or 0) < near:
            groups[-1].append(one)
        else:
            groups.append([one])
    return [sorted(group, key=lambda one: one.number) for group in groups]


def _left(scene: Scene, step: int) -> str:
    return f"{100 * scene.steps.share(step):.2f}%"


def _x(scene: Scene, step: float) -> str:
    return f"{_WIDTH * scene.steps.share(step):.1f}"


def _y(axis: Axis, value: float) -> str:
    # What lies far outside is drawn just outside: huge coordinates are not drawn at all.
    share = min(2.0, max(-1.0, axis.share(value)))
    return f"{_HEIGHT * (1 - share):.1f}"
