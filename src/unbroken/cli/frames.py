"""One frame of `unbroken top`: all runs as a table, or one run in full."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from unbroken.cli import output, vitals
from unbroken.cli.describe import is_current
from unbroken.supervisor.resources.course import read_column

_BARS = "▁▂▃▄▅▆▇█"
PLAIN_BARS = "_.:-=+*#"
_COURSE_WIDTH = 48
_LEAST_NAME_WIDTH = 6
# Without room, the first of these go first.
_DROPPED = ("WAIT", "CPU", "LOST", "STEPS/S", "MEMORY", "TO GO")


def many(runs: Sequence[dict[str, Any]], width: int) -> RenderableType:
    """Return a table of `runs` with what is amiss below it; in a narrow `width` it has fewer columns."""
    if not runs:
        return Text("no run is kept going now; start one with `unbroken run -- python train.py`")
    table = Table(box=None, pad_edge=False, collapse_padding=True, header_style="bold")
    rows = [_row(run) for run in runs]
    shown, left = _fitting([{name: name for name in rows[0]}, *rows], width)
    table.add_column("RUN", overflow="ellipsis", no_wrap=True, max_width=left)
    for name in shown:
        table.add_column(name, justify="left" if name == "STATE" else "right", no_wrap=True)
    for run, row in zip(runs, rows, strict=True):
        state = Text(row["STATE"], style=vitals.colour(run["state"]))
        table.add_row(Text(row["RUN"]), state, *(row[name] for name in shown if name != "STATE"))
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


def _fitting(rows: Sequence[dict[str, str]], width: int) -> tuple[list[str], int]:
    """Return which columns have room beside that of the names, and how much is left for those."""
    needed = {name: 1 + max(cell_len(row[name]) for row in rows) for name in rows[0]}
    names = min(needed.pop("RUN") - 1, _LEAST_NAME_WIDTH)
    for name in _DROPPED:
        if names + sum(needed.values()) <= width:
            break
        del needed[name]
    return list(needed), max(names, width - sum(needed.values()))


def _row(run: dict[str, Any]) -> dict[str, str]:
    used = run["resources"] if is_current(run) else {}
    totals = run["totals"] or {}
    speed = used.get("steps_per_second")
    cores, memory, share = used.get("cpu_cores"), used.get("memory_bytes"), used.get("data_wait_share")
    return {
        "RUN": str(run["name"]),
        "STATE": run["state"],
        "STEP": vitals.progress(run).replace(" of ", "/"),
        "STEPS/S": f"{speed:.3g}" if speed is not None else "",
        "TO GO": vitals.to_go(run),
        "LOST": output.duration(totals["lost_seconds"]) if totals.get("lost_seconds") else "",
        "CPU": f"{cores:.1f}" if cores is not None else "",
        "MEMORY": output.size(memory) if memory is not None else "",
        "WAIT": f"{share:.0%}" if share is not None else "",
    }


def _lines(run: dict[str, Any]) -> dict[str, RenderableType]:
    age = output.duration(run["beat_age_seconds"]) if run["beat_age_seconds"] is not None else ""
    state = Text(run["state"], style=vitals.colour(run["state"]))
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
