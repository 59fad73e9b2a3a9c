"""A report as one HTML page that needs nothing else: no script, no font, no request."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from html import escape
from pathlib import Path

from unbroken.dashboard import words
from unbroken.dashboard.chart import Numbered, Scene, chart, extremes, said
from unbroken.dashboard.course import Curve
from unbroken.dashboard.report import Report
from unbroken.dashboard.spent import THINGS

# Even a browser that is told otherwise by what a page contains asks nobody for anything.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
STYLE = Path(__file__).with_name("page.css")
_SPANS_OF_MAIN, _SPANS_OF_OTHERS = 1000, 300
_MOST_CHARTS = 24
_MOST_CHECKPOINTS = 40
_MOST_NAMES = 40
# On a telephone there is no room for more.
_DIGITS_OF_A_TILE = 4
_GOOD_STATES = ("running", "done", "starting")
_BAD_STATES = ("held", "lost", "unreadable")
# By their names: whether the lowest or the highest value is the one to look for.
_DOWN = ("loss", "err", "perplexity", "ppl", "nll", "mse", "mae", "rmse", "wer")
_UP = ("acc", "f1", "auc", "precision", "recall", "score", "bleu", "rouge", "iou", "reward", "return")
_SIGNS = (
    ("NaN or infinite", "nan", "&#215;"),
    ("the same, superseded since", "nan undone", "&#215;"),
    ("this and what follows it closely", "pin several", "1+"),
)
_LEGEND = (
    ("the curve that counts", '<path d="M1 7Q8 -2 23 4"/>'),
    ("done again or undone since", '<path class="superseded" d="M1 7Q8 -2 23 4"/>'),
    ("restart", '<line class="restart" x1="12" x2="12" y1="0" y2="14" stroke-dasharray="4 3"/>'),
    ("roll-back", '<line class="roll-back" x1="12" x2="12" y1="0" y2="14"/>'),
    (
        "alarm, or a state that is not finite",
        '<line class="alarm" x1="12" x2="12" y1="0" y2="14" stroke-dasharray="2 4"/>',
    ),
    ("data left out", '<line class="skipped" x1="12" x2="12" y1="0" y2="14" stroke-dasharray="6 2 1 2"/>'),
    ("checkpoint", '<path class="ok" d="M12 2L17 11H7Z"/>'),
    ("checkpoint of no use", '<path class="no" d="M8 3H16V11H8Z"/>'),
)


def page(report: Report) -> str:
    """Return the page."""
    title = f"{report.name}: {report.state}"
    problems = "".join(f'<p role="alert"><strong>{escape(one)}</strong></p>' for one in report.problems)
    text = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta name="referrer" content="no-referrer"><title>{escape(title)}</title>'
        f"<style>{STYLE.read_text()}</style></head><body>\n"
        f"<header>{_header(report)}{problems}{_tiles(report)}</header>\n<main>\n"
        f"{_charts(report)}{_marks(report)}{_spent(report)}{_checkpoints(report)}</main>\n"
        f"<footer><p>Made by <code>unbroken report</code> on {words.moment(report.made)} UTC from "
        f"{escape(report.directory)}. All times are UTC.</p></footer>\n</body></html>\n"
    )
    # Names of files may hold what no encoding has.
    return text.encode("utf-8", "replace").decode()


def main_curve(report: Report) -> Curve | None:
    """Return the curve to show first: that of the loss, if there is one."""
    curves = report.course.curves
    named = next((curve for name, curve in curves.items() if "loss" in name.lower()), None)
    return curves.get("loss") or named or next(iter(curves.values()), None)


def _header(report: Report) -> str:
    tone = "good" if report.state in _GOOD_STATES else ("bad" if report.state in _BAD_STATES else "")
    reason = f" {escape(report.reason)}" if report.reason else ""
    hint = f'<p class="quiet">{escape(report.hint)}</p>' if report.hint else ""
    return (
        f"<h1>{escape(report.name)}</h1>"
        f'<p><span class="state {tone}">{escape(report.state)}</span>{reason}</p>{hint}'
    )


def _tiles(report: Report) -> str:
    return '<dl class="tiles">' + "".join(_tile(*tile) for tile in _numbers(report)) + "</dl>"


def _tile(what: str, value: str, more: str = "") -> str:
    small = f"<small>{escape(more)}</small>" if more else ""
    return f"<div><dt>{escape(what)}</dt><dd>{escape(value)}{small}</dd></div>"


def _numbers(report: Report) -> Iterator[tuple[str, str, str]]:
    """Yield what stands at the top: what it is, its value, and a word to it."""
    course = report.course
    goal = f"of {words.count(report.goal_step)}" if report.goal_step else ""
    yield "step", words.count(report.step) if report.step is not None else "none yet", goal
    loss = main_curve(report)
    shown = [] if loss is None else [loss]
    shown += [curve for curve in course.curves.values() if curve is not loss and _is_ranked(curve.name)][:2]
    for curve in shown:
        if curve.last is not None:
            yield curve.name, words.value(curve.last[1], digits=_DIGITS_OF_A_TILE), _best(curve)
    ordinary = course.ordinary_seconds()
    if ordinary:
        yield "a step takes", words.duration(ordinary), "the median"
    total, lost = sum(one.seconds for one in report.spent), _lost(report)
    if total:
        yield (
            "time in all",
            words.duration(total),
            f"{lost / total:.1%} of it lost" if lost else "nothing lost",
        )
    yield "attempts", words.count(report.attempts), words.several(report.restarts, "restart")
    if report.rollbacks:
        yield "roll-backs", words.count(report.rollbacks), ""
    good = [one for one in report.checkpoints if not one.is_set_aside and not one.note]
    if good:
        yield "newest checkpoint", f"step {words.count(good[-1].step or 0)}", report.save_interval


def _is_ranked(name: str) -> bool:
    return any(part in name.lower() for part in (*_DOWN, *_UP))


def _best(curve: Curve) -> str:
    name = curve.name.lower()
    points = dict(extremes(curve))
    chosen = "highest" if any(part in name for part in _UP) and "loss" not in name else "lowest"
    point = points[chosen]
    return f"{chosen} {words.value(point[1])} at step {words.count(point[0])}" if point is not None else ""


def _lost(report: Report) -> float:
    return sum(one.seconds for one in report.spent if one.is_lost)


def _scene(report: Report) -> Scene:
    course = report.course
    steps = [one.mark.step or 0 for one in _numbered(report)]
    steps += [one.step or 0 for one in report.checkpoints]
    steps += [curve.last[0] for curve in course.curves.values() if curve.last is not None]
    steps += [
        line[-1][0]
        for curve in course.curves.values()
        for thinned in curve.superseded.values()
        for line in thinned.lines()
    ]
    # Beside its step a report may know of no curve at all.
    return Scene(
        last_step=max([report.step or 0, *steps]), marks=_numbered(report), checkpoints=report.checkpoints
    )


def _numbered(report: Report) -> list[Numbered]:
    return [Numbered(number, mark) for number, mark in enumerate(report.marks, report.earlier_marks + 1)]


def _charts(report: Report) -> str:
    course, scene = report.course, _scene(report)
    first = main_curve(report)
    if first is None:
        return '<section id="curve"><h2>No numbers yet</h2><p>No step has been journaled.</p></section>\n'
    head = (
        f'<section id="curve"><h2>{escape(first.name)} <small>by step</small></h2>'
        f"{chart(first, scene, spans=_SPANS_OF_MAIN, name=first.name)}"
        f'<ul class="legend">{_legend()}</ul></section>\n'
    )
    rest = [curve for curve in course.curves.values() if curve is not first]
    shown = rest[: _MOST_CHARTS - 1]
    if course.steps:
        shown = [*shown, course.step_seconds]
    small = "".join(_small(curve, scene) for curve in shown)
    others = _table_of_others(report, rest[_MOST_CHARTS - 1 :])
    return f'{head}<div class="grid-of-charts small">{small}</div>\n{others}'


def _legend() -> str:
    signs = [(said, f'<i class="{kind}" aria-hidden="true">{sign}</i>') for said, kind, sign in _SIGNS]
    signs += [(said, f'<svg viewBox="0 0 24 14" aria-hidden="true">{drawn}</svg>') for said, drawn in _LEGEND]
    return "".join(f"<li>{sign} {said}</li>" for said, sign in signs)


def _small(curve: Curve, scene: Scene) -> str:
    # There is no room for pins, and the large picture has them all.
    bare = replace(scene, checkpoints=(), has_pins=False)
    text = said(curve, curve.name).partition("; ")[2]
    return (
        f'<section class="metric"><h3>{escape(curve.name)}</h3><p class="quiet">{escape(text)}</p>'
        f"{chart(curve, bare, spans=_SPANS_OF_OTHERS, name=curve.name)}</section>\n"
    )


def _table_of_others(report: Report, curves: Sequence[Curve]) -> str:
    rows = [
        (curve.name, *(words.value(point[1]) if point is not None else "" for point in _three(curve)))
        for curve in curves
    ]
    if not rows:
        return ""
    table = _table(("metric", "newest", "lowest", "highest"), rows)
    names = sorted(report.course.others)
    more = f" and {len(names) - _MOST_NAMES:,} more" if len(names) > _MOST_NAMES else ""
    left = f"not looked at: {', '.join(names[:_MOST_NAMES])}{more}" if names else ""
    return f'<section><h2>Other metrics</h2>{table}<p class="quiet">{escape(left)}</p></section>\n'


def _three(curve: Curve) -> Iterator[tuple[int, float] | None]:
    yield curve.last
    for _, point in extremes(curve):
        yield point


def _marks(report: Report) -> str:
    if not report.marks:
        return '<section id="marks"><h2>What happened</h2><p>Nothing out of the ordinary.</p></section>\n'
    earlier = (
        f'<p class="quiet">{words.several(report.earlier_marks, "earlier mark")} are left out here; '
        "<code>unbroken why</code> lists all attempts.</p>"
        if report.earlier_marks
        else ""
    )
    items = "".join(_mark(one) for one in _numbered(report))
    return (
        f'<section id="marks"><h2>What happened</h2>{earlier}<ol class="marks" '
        f'start="{report.earlier_marks + 1}">{items}</ol></section>\n'
    )


def _mark(one: Numbered) -> str:
    mark = one.mark
    place = [f"step {words.count(mark.step)}"] if mark.step is not None else []
    place += [words.moment(mark.time)] if mark.time is not None else []
    lines = "".join(f"<li>{_lines(line)}</li>" for line in mark.words)
    details = f"<ul>{lines}</ul>" if lines else ""
    return (
        f'<li id="mark-{one.number}"><span class="pin {mark.kind}">{one.number}</span><div>'
        f'<h3>{escape(mark.title)}</h3><p class="quiet">{escape(", ".join(place))}</p>{details}</div></li>\n'
    )


def _lines(text: str) -> str:
    return escape(text).replace("\n", "<br>")


def _spent(report: Report) -> str:
    total = sum(one.seconds for one in report.spent)
    if not total:
        return ""
    looks = [f"t{THINGS.index(one.what)}{' lost' if one.is_lost else ''}" for one in report.spent]
    bar = "".join(
        f'<i class="{look}" style="flex:{one.seconds / total:.5f} 1 0" title="{escape(one.what)}"></i>'
        for look, one in zip(looks, report.spent, strict=True)
    )
    spoken = ", ".join(f"{one.what} {one.seconds / total:.0%}" for one in report.spent)
    rows = "".join(
        f'<tr><td><i class="swatch {look}"></i>{escape(one.what)}{_quietly(one.words)}</td>'
        f'<td class="number">{words.duration(one.seconds)}</td>'
        f'<td class="number">{one.seconds / total:.1%}</td></tr>'
        for look, one in zip(looks, report.spent, strict=True)
    )
    return (
        f'<section id="spent"><h2>Where the time went</h2><p>{words.duration(total)} in all, '
        f"{words.duration(_lost(report))} of it lost (hatched).</p>"
        f'<div class="bar" role="img" aria-label="{escape(spoken)}">{bar}</div>'
        f"<table><tbody>{rows}</tbody></table></section>\n"
    )


def _quietly(text: str) -> str:
    return f' <span class="quiet">{escape(text)}</span>' if text else ""


def _checkpoints(report: Report) -> str:
    if not report.checkpoints:
        return '<section id="checkpoints"><h2>Checkpoints</h2><p>None yet.</p></section>\n'
    newest = list(reversed(report.checkpoints))
    rows: list[Sequence[str]] = [
        (
            one.name,
            words.size(one.size_bytes) if one.size_bytes is not None else "",
            one.created,
            ", ".join(f"{name} {words.value(value)}" for name, value in one.metrics.items()),
            ("in quarantine: " if one.is_set_aside else "") + one.note,
        )
        for one in newest[:_MOST_CHECKPOINTS]
    ]
    more = len(newest) - len(rows)
    left = f'<p class="quiet">and {more:,} older; <code>unbroken ls</code> lists all.</p>' if more else ""
    names: Sequence[str] = ("checkpoint", "size", "written", "metrics", "what is wrong with it")
    if not any(row[-1] for row in rows):
        names, rows = names[:-1], [row[:-1] for row in rows]
    return f'<section id="checkpoints"><h2>Checkpoints</h2>{_table(names, rows)}{left}</section>\n'


def _table(names: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in names)
    body = "".join(
        "<tr>" + "".join(_cell(name, text) for name, text in zip(names, row, strict=True)) + "</tr>\n"
        for row in rows
    )
    return f'<table class="stacks"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'


def _cell(name: str, text: str) -> str:
    return f'<td data-label="{escape(name)}">{escape(text)}</td>'
