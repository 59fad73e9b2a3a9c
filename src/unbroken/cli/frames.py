"""One frame of `unbroken top`: all runs as a table, or one run in full."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from unbroken.cli import output, vitals
from unbroken.cli.describe import is_current
from unbroken.supervisor.course import read_column

_COLOURS = {"running": "green", "done": "green", "held": "red", "lost": "red", "unreadable": "red"}
_BARS = "▁▂▃▄▅▆▇█"
PLAIN_BARS = "_.:-=+*#"
_COURSE_WIDTH = 48


def many(runs: Sequence[dict[str, Any]]) -> RenderableType:
    """Return a table of `runs` with what is amiss below it, 80 columns wide or as wide as there is room."""
    if not runs:
        return Text("no run is kept going now; start one with `unbroken run -- python train.py`")
    table = Table(box=None, pad_edge=False, collapse_padding=True, header_style="bold")
    table.add_column("RUN", overflow="ellipsis", no_wrap=True, min_width=6)
    table.add_column("STATE", no_wrap=True)
    for name in ("STEP", "STEPS/S", "TO GO", "LOST", "CPU", "MEMORY", "WAIT"):
        table.add_column(name, justify="right", no_wrap=True)
    for run in runs:
        table.add_row(*_row(run))
    notes = [
        Text.assemble((str(run["name"]), "bold"), f": {run['hint'] or run['reason']}")
        for run in runs
        if run["hint"] or run["state"] != "running"
    ]
    return Group(_title(f"{len(runs)} runs" if len(runs) > 1 else "1 run"), table, *notes)


def one(run: dict[str, Any]) -> RenderableType:
    """Return all that is known of `run`, with its course so far."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in _lines(run).items():
        if text:
            table.add_row(name, text)
    return Group(_title(run["directory"]), table)


def course(values: Sequence[float], bars: str = PLAIN_BARS) -> str:
    """Return `values` as `bars`, the newest last, at most 48 of them; empty for fewer than two.

    >>> course([0, 1, 2, 3, 7])
    '_.:-#'
    """
    if len(values) < 2:
        return ""
    count = min(_COURSE_WIDTH, len(values))
    shown = [values[(index + 1) * len(values) // count - 1] for index in range(count)]
    top = max(shown) or 1.0
    return "".join(bars[round(max(0.0, value) / top * (len(bars) - 1))] for value in shown)


def _title(text: str) -> Text:
    return Text(f"unbroken top, {time.strftime('%H:%M:%S')}: {text}", style="dim")


def _row(run: dict[str, Any]) -> list[RenderableType]:
    used = run["resources"] if is_current(run) else {}
    totals = run["totals"] or {}
    speed = used.get("steps_per_second")
    cores, memory, share = used.get("cpu_cores"), used.get("memory_bytes"), used.get("data_wait_share")
    return [
        Text(str(run["name"])),
        _state(run),
        vitals.progress(run).replace(" of ", "/"),
        f"{speed:.3g}" if speed is not None else "",
        vitals.to_go(run),
        output.duration(totals["lost_seconds"]) if totals.get("lost_seconds") else "",
        f"{cores:.1f}" if cores is not None else "",
        output.size(memory) if memory is not None else "",
        f"{share:.0%}" if share is not None else "",
    ]


def _lines(run: dict[str, Any]) -> dict[str, RenderableType]:
    age = output.duration(run["beat_age_seconds"]) if run["beat_age_seconds"] is not None else ""
    state = _state(run)
    if run["changed"]:
        state.append(f" for {output.duration(time.time() - run['changed'])}", style="default")
    facts: dict[str, RenderableType] = {
        "run": Text(str(run["name"])),
        "state": state,
        "reason": Text(run["reason"] or ""),
        "hint": Text(run["hint"] or ""),
        "attempt": Text(vitals.attempt(run)),
        "step": Text(f"{vitals.progress(run)}, {run['phase']}, {age} ago" if run["phase"] else ""),
    }
    if run["goal_step"]:
        facts["progress"] = ProgressBar(total=run["goal_step"], completed=run["step"], width=_COURSE_WIDTH)
    facts |= {name: Text(text) for name, text in vitals.lines(run).items()}
    directory = Path(run["directory"])
    # Not every terminal, and not every file, takes what is beyond ASCII.
    bars = _BARS if (sys.stdout.encoding or "").lower().startswith("utf") else PLAIN_BARS
    facts["speed so far"] = Text(course(read_column(directory, "steps_per_second"), bars))
    facts["memory so far"] = Text(course(read_column(directory, "memory_bytes"), bars))
    facts["checkpoint"] = Text(run["checkpoint"] or "")
    return facts


def _state(run: dict[str, Any]) -> Text:
    return Text(run["state"], style=_COLOURS.get(run["state"], "yellow"))
