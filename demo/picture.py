"""The picture: loss over steps of both runs, the events, the attempts. One HTML file, nothing else."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from chart import GRID, INK, QUIET, Axis, Point, curve, element, label, rows_without_overlap, text, value_axis
from disasters import Event
from table import cells

Losses = Sequence[tuple[int, float]]

_REFERENCE, _DISTURBED, _REPEATED, _EVENT = "#93c5fd", "#1e3a8a", "#ea580c", "#b91c1c"
_WIDTH, _LEFT, _RIGHT = 1120.0, 62.0, 1096.0
_LABELS, _LABEL_ROW, _PLOT, _ATTEMPT_ROW = 48.0, 24.0, 300.0, 18.0
_CHARACTER = 6.6  # pixels, about, at the font size of the labels

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1f2937; background: #ffffff; max-width: 1120px;
       margin: 40px auto; padding: 0 24px; }
h1 { font-size: 26px; margin: 0 0 4px; } h2 { font-size: 18px; margin: 40px 0 4px; }
p { margin: 0 0 12px; color: #4b5563; } p.verdict { font-weight: 600; font-size: 18px; }
p.equal { color: #15803d; } p.different { color: #b91c1c; }
svg { width: 100%; height: auto; display: block; }
table { border-collapse: collapse; margin-top: 12px; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 6px 18px 6px 0; border-bottom: 1px solid #e5e7eb; }
th { color: #6b7280; font-weight: 500; font-size: 14px; } td.number, th.number { text-align: right; }
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """All that is shown. `attempts` holds the losses of each attempt of the disturbed run, in order."""

    title: str
    verdict: str
    is_identical: bool
    reference: Losses
    attempts: Sequence[Losses]
    events: Sequence[Event]


def page(story: Story) -> str:
    """Return the whole HTML document; it is also well-formed XML."""
    kind = "verdict equal" if story.is_identical else "verdict different"
    close_up = _close_up(story)
    body = (
        element("h1", escape(story.title)),
        element("p", escape(story.verdict), class_=kind),
        element(
            "p",
            "Below, the broad pale line is the undisturbed run. The thin one on it is the run that was "
            "killed, stopped and damaged; it is orange where steps were done again after a resume.",
        ),
        _overview(story),
        _table(story.events),
        *((element("h2", "Close-up"), close_up) if close_up else ()),
    )
    head = (
        element("meta", charset="utf-8"),
        element("title", escape(story.title)),
        element("style", _STYLE),
    )
    return f"<!doctype html>\n{element('html', element('head', *head), element('body', *body), lang='en')}\n"


def _overview(story: Story) -> str:
    steps = Axis(low=0, high=max(step for step, _ in story.reference), start=_LEFT, end=_RIGHT)
    rows = rows_without_overlap([_span(steps, event, index) for index, event in enumerate(story.events)])
    top = _LABELS + _LABEL_ROW * (max(rows, default=0) + 1) + 10.0
    bottom = top + _PLOT
    losses = value_axis(
        [loss for points in (story.reference, *story.attempts) for _, loss in _finite(points)],
        start=bottom,
        end=top,
    )
    end = bottom + 34.0 + _ATTEMPT_ROW * len(story.attempts)
    repeated = [(event.resumed_step, event.at_step) for event in story.events if event.repeated_steps]
    drawn = (
        _legend(),
        *(_band(steps, span, top, end) for span in repeated),
        _grid(steps, losses, end),
        text("loss", 14, top + 4, fill=QUIET),
        curve(_points(steps, losses, story.reference), stroke=_REFERENCE, stroke_width=6),
        *(
            curve(_points(steps, losses, points), stroke=_DISTURBED, stroke_width=1.2)
            for points in story.attempts
        ),
        *(
            curve(
                _points(steps, losses, [point for point in points if begin < point[0] <= last]),
                stroke=_REPEATED,
                stroke_width=1.6,
            )
            for begin, last in repeated
            for points in story.attempts
        ),
        *_attempt_bars(story, steps, bottom + 30.0),
        *(
            _marker(steps, event, index, _LABELS + _LABEL_ROW * row, end)
            for index, (event, row) in enumerate(zip(story.events, rows, strict=True))
        ),
    )
    return _svg(end + 46.0, *drawn, label_="Loss over steps of both runs, with events and attempts")


def _close_up(story: Story) -> str:
    """Return the figure of the event that cost most steps, step by step; empty if none cost any."""
    index, event = max(enumerate(story.events), key=lambda item: item[1].repeated_steps, default=(0, None))
    if event is None or not event.repeated_steps:
        return ""
    first, last = max(1, event.resumed_step - 6), event.at_step + 6
    attempts = [[point for point in points if first <= point[0] <= last] for points in story.attempts]
    reference = [point for point in story.reference if first <= point[0] <= last]
    steps = Axis(low=first - 1, high=last + 1, start=_LEFT, end=_RIGHT)
    top, bottom = 46.0, 266.0
    losses = value_axis([loss for _, loss in _finite(reference)], start=bottom, end=top)
    again = (event.resumed_step, event.at_step)
    drawn = (
        _band(steps, again, top, bottom),
        _grid(steps, losses, bottom),
        text("loss", 14, top + 4, fill=QUIET),
        text(
            f"Event {index + 1}, {event.name}: steps {again[0] + 1:,} to {again[1]:,} were done twice. "
            "The disc is the undisturbed run, the dot the first time, the ring the second.",
            _LEFT,
            24,
        ),
        *(_dot(point, 6.5, fill=_REFERENCE) for point in _points(steps, losses, reference)),
        *(_dot(point, 2.2, fill=_DISTURBED) for run in attempts for point in _points(steps, losses, run)),
        *(
            _dot(point, 4.4, fill="none", stroke=_REPEATED, stroke_width=1.6)
            for run in attempts
            for point in _points(steps, losses, run)
            if steps.at(again[0]) < point[0] <= steps.at(again[1])
        ),
    )
    return _svg(bottom + 46.0, *drawn, label_="Loss of every step around one event")


def _svg(height: float, *drawn: str, label_: str) -> str:
    return element(
        "svg",
        *drawn,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {_WIDTH:.0f} {height:.0f}",
        role="img",
        aria_label=label_,
        font_family="system-ui, sans-serif",
    )


def _legend() -> str:
    lines = (
        (_REFERENCE, 6.0, "undisturbed run"),
        (_DISTURBED, 1.6, "disturbed run"),
        (_REPEATED, 2.4, "steps done again after a resume"),
    )
    drawn, x = "", _LEFT
    for colour, width, words in lines:
        drawn += element("line", x1=x, x2=x + 28, y1=12.0, y2=12.0, stroke=colour, stroke_width=width)
        drawn += text(words, x + 36, 16)
        x += 36 + _CHARACTER * len(words) + 34
    return drawn + _dot((x + 8, 12.0), 8.0, fill=_EVENT) + text("event", x + 24, 16)


def _grid(steps: Axis, losses: Axis, bottom: float) -> str:
    drawn = ""
    for value in losses.ticks(6):
        y = losses.at(value)
        drawn += element("line", x1=steps.start, x2=steps.end, y1=y, y2=y, stroke=GRID)
        drawn += text(label(value), steps.start - 8, y + 4, text_anchor="end", fill=QUIET)
    drawn += element("line", x1=steps.start, x2=steps.end, y1=bottom, y2=bottom, stroke=INK)
    for value in steps.ticks(10):
        x = steps.at(value)
        drawn += element("line", x1=x, x2=x, y1=bottom, y2=bottom + 5, stroke=INK)
        drawn += text(label(value), x, bottom + 20, text_anchor="middle", fill=QUIET)
    middle = (steps.start + steps.end) / 2
    return drawn + text("step", middle, bottom + 40, text_anchor="middle", fill=QUIET)


def _attempt_bars(story: Story, steps: Axis, top: float) -> list[str]:
    """One bar for each attempt, under the other: where two overlap, steps were done twice."""
    drawn = [text("attempt", 8, top - 8, fill=QUIET, font_size=12)]
    for index, points in enumerate(story.attempts):
        y = top + _ATTEMPT_ROW * index
        drawn.append(
            text(str(index + 1), steps.start - 8, y + 9, text_anchor="end", fill=QUIET, font_size=12)
        )
        if points:
            begin, end = steps.at(points[0][0] - 1), steps.at(points[-1][0])
            drawn.append(_bar(begin, end, y, _DISTURBED))
            again = [event for event in story.events[index - 1 : index] if event.repeated_steps]
            drawn += [_bar(begin, steps.at(event.at_step), y, _REPEATED) for event in again]
    return drawn


def _bar(begin: float, end: float, y: float, colour: str) -> str:
    return element("rect", x=begin, y=y, width=max(1.5, end - begin), height=9, fill=colour)


def _marker(steps: Axis, event: Event, index: int, y: float, bottom: float) -> str:
    x = steps.at(event.at_step)
    again = f", {event.repeated_steps} steps done again" if event.repeated_steps else ""
    words = f"{event.name} at step {event.at_step}: {event.seen}; from {event.resumed_from}{again}"
    is_left = _is_label_left(steps, event)
    return element(
        "g",
        element("title", escape(words)),
        element("line", x1=x, x2=x, y1=y, y2=bottom, stroke=_EVENT, stroke_dasharray="3 3"),
        _dot((x, y), 9.0, fill=_EVENT),
        text(str(index + 1), x, y + 4, fill="#ffffff", font_size=12, text_anchor="middle", font_weight=600),
        text(event.name, x + (-14 if is_left else 14), y + 4, text_anchor="end" if is_left else "start"),
    )


def _span(steps: Axis, event: Event, index: int) -> tuple[float, float]:
    """Return from where to where the marker of an event and its label reach."""
    x, width = steps.at(event.at_step), 24 + _CHARACTER * len(event.name) + 8
    return (x - width, x + 12) if _is_label_left(steps, event) else (x - 12, x + width)


def _is_label_left(steps: Axis, event: Event) -> bool:
    return steps.at(event.at_step) + 24 + _CHARACTER * len(event.name) > _WIDTH


def _band(steps: Axis, span: tuple[int, int], top: float, bottom: float) -> str:
    begin, end = steps.at(span[0]), steps.at(span[1])
    return element("rect", x=begin, y=top, width=end - begin, height=bottom - top, fill="#ffedd5")


def _dot(point: Point, radius: float, **attributes: object) -> str:
    return element("circle", cx=point[0], cy=point[1], r=radius, **attributes)


def _points(steps: Axis, losses: Axis, points: Losses) -> list[Point]:
    return [(steps.at(step), losses.at(loss)) for step, loss in _finite(points)]


def _finite(points: Losses) -> Losses:
    return [(step, loss) for step, loss in points if math.isfinite(loss)]


def _table(events: Sequence[Event]) -> str:
    names = ("", "event", "at step", "resumed from", "steps repeated", "what was seen")
    kinds = ("number", "", "number", "", "number", "")
    head = (element("th", escape(name), class_=kind) for name, kind in zip(names, kinds, strict=True))
    rows = (
        element(
            "tr",
            *(
                element("td", escape(cell), class_=kind)
                for cell, kind in zip(cells(index + 1, event), kinds, strict=True)
            ),
        )
        for index, event in enumerate(events)
    )
    return element("table", element("tr", *head), *rows)
