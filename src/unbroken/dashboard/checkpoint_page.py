"""A checkpoint as one HTML page that needs nothing else: no script, no font, no request."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from unbroken.dashboard import words
from unbroken.dashboard.branches import Branch, branches, is_finite
from unbroken.dashboard.page import POLICY, STYLE
from unbroken.dashboard.tensor_tree import printed, tree
from unbroken.dashboard.treemap import treemap

_OWN_STYLE = Path(__file__).with_name("checkpoint_page.css")
_COLOURS = 11
_MOST_OPEN_ROWS = 12
_MOST_FINDINGS = 200


class Section(NamedTuple):
    """A table with a title."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointPage:
    """What is shown of a checkpoint. `parts` and `tensors` are as `unbroken inspect --json` has them.

    `lines` say what it is, the first of them where. `verdict` is in words whether every byte is what was
    written, with `is_bad`; `findings` are what is wrong with it.
    """

    name: str
    lines: Sequence[str]
    verdict: str
    is_bad: bool
    findings: Sequence[str]
    parts: Mapping[str, Mapping[str, Any]]
    tensors: Sequence[Mapping[str, Any]]
    sections: Sequence[Section]


def checkpoint_page(found: CheckpointPage) -> str:
    """Return the page."""
    root = branches(found.tensors)
    text = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta name="referrer" content="no-referrer"><title>{printed(found.name)}</title>'
        f"<style>{STYLE.read_text()}{_OWN_STYLE.read_text()}</style></head><body>\n"
        f"<header>{_header(found)}</header>\n<main>\n{_parts(found)}{_map(root)}{_tensors(found, root)}"
        f"{''.join(map(_section, filter(lambda one: one.rows, found.sections)))}</main>\n"
        "<footer><p>Made by <code>unbroken inspect</code>.</p></footer>\n</body></html>\n"
    )
    # Names of files may hold what no encoding has.
    return text.encode("utf-8", "replace").decode()


def _header(found: CheckpointPage) -> str:
    tone = "bad" if found.is_bad else "good"
    lines = "".join(f"<p>{printed(line)}</p>" for line in found.lines)
    findings = "".join(f"<li>{printed(line)}</li>" for line in found.findings[:_MOST_FINDINGS])
    more = len(found.findings) - _MOST_FINDINGS
    findings += f"<li>and {words.count(more)} more</li>" if more > 0 else ""
    return (
        f"<h1>{printed(found.name)}</h1>{lines}"
        + (f'<p><span class="state {tone}">{printed(found.verdict)}</span></p>' if found.verdict else "")
        + (f'<ul role="alert" class="bad">{findings}</ul>' if findings else "")
    )


def _parts(found: CheckpointPage) -> str:
    total = sum(part["size_bytes"] for part in found.parts.values())
    if not found.parts:
        return ""
    pieces = "".join(
        f'<i class="t{number % _COLOURS}" style="flex:{part["size_bytes"]}" title="{printed(name)}"></i>'
        for number, (name, part) in enumerate(found.parts.items())
        if part["size_bytes"]
    )
    rows = [_part(number, name, part, total) for number, (name, part) in enumerate(found.parts.items())]
    table = _table(("part", "size", "share", "tensors", "dtypes"), rows)
    return (
        f'<section id="parts"><h2>Parts</h2><div class="bar" aria-hidden="true">{pieces}</div>'
        f"{table}</section>\n"
    )


def _part(number: int, name: str, part: Mapping[str, Any], total_bytes: int) -> list[str]:
    share = part["size_bytes"] / total_bytes if total_bytes else 0
    of = f" <small>{printed(part['type'])}</small>" if part.get("type") else ""
    return [
        f'<span><i class="swatch t{number % _COLOURS}"></i>{printed(name)}{of}</span>',
        words.size(part["size_bytes"]),
        f"{share:.1%}",
        words.count(part["tensors"]),
        printed(", ".join(part["dtypes"])),
    ]


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of cells in HTML; on a telephone each row is a list."""
    head = "".join(f"<th>{text}</th>" for text in header)
    lines = "".join(
        "<tr>"
        + "".join(f'<td data-label="{label}">{cell}</td>' for label, cell in zip(header, row, strict=True))
        + "</tr>\n"
        for row in rows
    )
    return f'<table class="stacks"><thead><tr>{head}</tr></thead><tbody>\n{lines}</tbody></table>'


def _map(root: Branch) -> str:
    picture = treemap(root)
    return f'<section id="sizes"><h2>Sizes</h2>{picture}</section>\n' if picture else ""


def _tensors(found: CheckpointPage, root: Branch) -> str:
    bad = [row["path"] for row in found.tensors if not is_finite(row)]
    alarm = ""
    if bad:
        many = f"{words.several(len(bad), 'tensor')} with NaN or infinite numbers"
        alarm = f'<p role="alert" class="bad"><strong>{many}</strong>, {printed(bad[0])} for one</p>'
    head = f"<h2>Tensors <small>{words.count(len(found.tensors))}</small></h2>"
    return f'<section id="tensors">{head}{alarm}{_of_histograms(found)}{tree(root)}</section>\n'


def _of_histograms(found: CheckpointPage) -> str:
    """Return which tensors have a histogram, where not all do."""
    drawn = sum("histogram" in row for row in found.tensors)
    if drawn in (0, len(found.tensors)):
        return ""
    largest = f"the {words.count(drawn)} largest of {words.count(len(found.tensors))} tensors"
    return f'<p class="quiet">Histograms are of {largest} only.</p>'


def _section(section: Section) -> str:
    is_open = " open" if len(section.rows) <= _MOST_OPEN_ROWS else ""
    header = [printed(text.lower()) for text in section.header]
    table = _table(header, ([printed(cell) for cell in row] for row in section.rows))
    return (
        f'<details class="section"{is_open}><summary><h2>{printed(section.title)} '
        f"<small>{words.count(len(section.rows))}</small></h2></summary>"
        f"{table}</details>\n"
    )
