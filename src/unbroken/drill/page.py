"""A drill as one HTML page that needs nothing else: both curves, the kills, the verdict."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from itertools import pairwise

from unbroken.drill.comparison import number, steps_of
from unbroken.drill.process import Ended
from unbroken.drill.verdict import Findings, Verdict
from unbroken.rundir.rehearsal import Line

_WIDTH, _HEIGHT = 900, 320
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 16, 36
_STYLE = """
:root { color-scheme: light dark; --line: #8a8f98; --kill: #d33; --resumed: #0a7d4f; --reference: #9db8f5; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem;
  overflow-wrap: anywhere; }
h1 { font-size: 1.25rem; } code, pre { font-family: ui-monospace, monospace; font-size: .9em; }
.verdict { border-left: .4rem solid var(--kill); padding: .25rem 1rem; overflow-wrap: anywhere; }
.proven { border-color: var(--resumed); } svg { width: 100%; height: auto; }
table { display: block; overflow-x: auto; border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .3rem .8rem .3rem 0; border-bottom: 1px solid #8884; }
svg text { font: 12px system-ui, sans-serif; fill: currentColor; } footer { color: var(--line); }
"""
Points = Sequence[tuple[int, float]]


def page(found: Findings, verdict: Verdict) -> str:
    """Return the page."""
    is_proven = " proven" if verdict.outcome == "proven" else ""
    details = "".join(f"<li>{escape(line)}</li>" for line in verdict.details)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{escape(verdict.headline)}</title><style>{_STYLE}</style></head><body>\n"
        "<h1>unbroken drill</h1>\n"
        f'<div class="verdict{is_proven}"><p><strong>{escape(verdict.headline)}</strong></p>'
        f"<ul>{details}</ul></div>\n"
        f"<p><code>{escape(shlex.join(found.command))}</code></p>\n"
        f"{_chart(found)}\n{_table(found.processes)}\n"
        f"<footer>{found.steps} steps, {found.components} components compared at each step, "
        f"seed {found.seed}</footer>\n</body></html>\n"
    )


def _chart(found: Findings) -> str:
    name = _metric(found.reference)
    if name is None:
        return "<p>The script records no metric: there is no curve to show.</p>"
    reference = _points(found.reference, name)
    attempts = [_points(process.lines, name) for process in found.processes]
    scale = _Scale([reference, *attempts], found.steps)
    kills = [(process.reached, _how(process)) for process in found.kills]
    marks = "".join(scale.mark(step, how) for step, how in kills)
    curves = "".join(scale.curve(points, "var(--resumed)", 2) for points in attempts)
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(name)} by step">'
        f"{scale.axes()}{marks}{scale.curve(reference, 'var(--reference)', 7)}{curves}</svg>\n"
        f'<p>{escape(name)}: <span style="color:var(--reference)">&#9644;</span> undisturbed, '
        '<span style="color:var(--resumed)">&#9644;</span> killed and resumed, '
        '<span style="color:var(--kill)">&#9474;</span> killed</p>'
    )


class _Scale:
    """Where steps and values lie in the picture."""

    def __init__(self, curves: Iterable[Points], steps: int) -> None:
        values = [value for points in curves for _, value in points] or [0.0]
        self._low, self._high = min(values), max(values)
        self._steps = max(steps, 2)

    def curve(self, points: Points, colour: str, width: int) -> str:
        if len(points) == 1:
            at = f'cx="{self._x(points[0][0]):.1f}" cy="{self._y(points[0][1]):.1f}"'
            return f'<circle {at} r="{width}" fill="{colour}"/>'
        # A loss that is not finite has no place in the picture: there the line is broken.
        runs = " ".join(
            f"M{self._x(a):.1f} {self._y(u):.1f}L{self._x(b):.1f} {self._y(v):.1f}"
            for (a, u), (b, v) in pairwise(points)
            if b == a + 1
        )
        look = f'stroke="{colour}" stroke-width="{width}" stroke-linecap="round"'
        return f'<path d="{runs}" fill="none" {look}/>'

    def mark(self, step: int, how: str) -> str:
        x = f"{self._x(step):.1f}"
        return (
            f'<line x1="{x}" x2="{x}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}" stroke="var(--kill)" '
            f'stroke-dasharray="4 3"><title>{escape(how)}</title></line>'
        )

    def axes(self) -> str:
        bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
        text = [
            f'<text x="{_LEFT - 8}" y="{self._y(value) + 4:.1f}" text-anchor="end">{value:.4g}</text>'
            for value in dict.fromkeys((self._low, self._high))
        ]
        text += [
            f'<text x="{self._x(step):.1f}" y="{_HEIGHT - 12}" text-anchor="{anchor}">step {step}</text>'
            for step, anchor in ((1, "start"), (self._steps, "end"))
        ]
        lines = f"M{_LEFT} {_TOP}V{bottom}H{right}"
        return f'<path d="{lines}" fill="none" stroke="var(--line)"/>{"".join(text)}'

    def _x(self, step: int) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * (step - 1) / (self._steps - 1)

    def _y(self, value: float) -> float:
        share = (value - self._low) / (self._high - self._low) if self._high > self._low else 0.5
        return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * share


def _table(processes: Sequence[Ended]) -> str:
    if not processes:
        return ""
    head = "".join(f"<th>{text}</th>" for text in ("process", "began", "ended", "how", "seconds"))
    rows = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in _row(index, process)) + "</tr>\n"
        for index, process in enumerate(processes)
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>\n{rows}</tbody></table>"


def _row(index: int, process: Ended) -> Iterator[str]:
    yield "first" if index == 0 else f"resume {index}"
    yield f"from step {process.began_at}" if process.began_at else "anew"
    yield f"step {process.reached}"
    yield _how(process)
    yield f"{process.seconds:.1f}"


def _how(process: Ended) -> str:
    kill = process.plan.kill
    is_killed = any(line.kind == "killed" for line in process.lines)
    return f"{kill.signal} {kill.moment}" if kill is not None and is_killed else "complete"


def _metric(lines: Iterable[Line]) -> str | None:
    names = [name for line in steps_of(lines).values() for name in line.metrics]
    return "loss" if "loss" in names else next(iter(names), None)


def _points(lines: Iterable[Line], name: str) -> Points:
    found = [
        (step, number(line.metrics[name])) for step, line in steps_of(lines).items() if name in line.metrics
    ]
    return [(step, value) for step, value in found if math.isfinite(value)]
