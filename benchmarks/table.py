"""Print the results as Markdown: medians, and in brackets how many times unbroken's they are.

python benchmarks/table.py [--results benchmarks/results]
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import machine
from peers import ENTRIES, OURS
from plan import FROZEN_SAVES, MEASUREMENTS

RESULTS = Path(__file__).resolve().parent / "results"
# With so many quiet runs the others are not looked at.
ENOUGH_QUIET = 3
QUIET_CORES = 0.25
NONE = "-"
MB = "{:,.1f}".format
Run = dict[str, Any]
Value = Callable[[Run], float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One number of each peer: the median of `value` over those of its runs that `only` takes."""

    title: str
    value: Value
    form: Callable[[float], str] = "{:.3g}".format
    only: Callable[[Run], bool] = lambda run: True
    is_compared: bool = False

    def median(self, runs: Sequence[Run]) -> float | None:
        chosen = [run for run in runs if self.only(run)]
        quiet = [run for run in chosen if is_quiet(run)]
        values = [self.value(run) for run in (quiet if len(quiet) >= ENOUGH_QUIET else chosen)]
        numbers = [value for value in values if value is not None]
        return statistics.median(numbers) if numbers else None

    def cell(self, runs: Sequence[Run], ours: Sequence[Run]) -> str:
        mine, theirs = self.median(ours), self.median(runs)
        if theirs is None:
            return NONE
        if not self.is_compared or not mine or runs is ours:
            return self.form(theirs)
        return f"{self.form(theirs)} ({theirs / mine:.2g}x)"


def is_quiet(run: Run) -> bool:
    return bool(run["was_quiet"]) and (run.get("others_cores") or 0) < QUIET_CORES


def tables(results: dict[str, Any]) -> list[str]:
    """Return the lines of the tables of one measurement."""
    name, runs = results["measurement"], results["runs"]
    lines = ["", f"## {name}, repeated {results['repetitions']} times"]
    if results["quick"]:
        lines += ["", "A quick run: these numbers mean nothing."]
    if name == "growth":
        gone = [f"{gone['label']} left out: {gone['reason']}" for gone in results["left_out"]]
        return [*lines, "", *_growth(runs), *gone]
    # One run for each save of a process that saved more than once.
    single = [{**run, **saved, "save": n} for run in runs for n, saved in enumerate(run.get("saves", [{}]))]
    for state in dict.fromkeys(found["state"] for found in (*single, *results["left_out"])):
        found = [run for run in single if run["state"] == state]
        left_out = {gone["peer"]: gone["reason"] for gone in results["left_out"] if gone["state"] == state}
        lines += ["", _title(state, found), "", *_comparison(found, COLUMNS[name], left_out)]
    return lines


def _title(state: str, runs: Sequence[Run]) -> str:
    # The limits write the same bytes as one.
    tensors = max((run.get("tensors", 0) for run in runs), default=0)
    size_bytes = max((run["size_bytes"] for run in runs), default=0)
    return f"### {state}: {size_bytes / 1e6:,.1f} MB" + (f" in {tensors:,} tensors" if tensors else "")


def _comparison(runs: Sequence[Run], columns: Sequence[Column], left_out: dict[str, str]) -> list[str]:
    peers = {name: [run for run in runs if run["peer"] == name] for name in ENTRIES}
    rows = []
    for name, found in peers.items():
        if found or name in left_out:
            cells = [column.cell(found, peers[OURS]) for column in columns]
            notes = [f"left out: {left_out[name]}"] if name in left_out else []
            quiet = sum(is_quiet(run) for run in found)
            notes += [f"{quiet} of {len(found)} quiet"] if found else []
            rows.append([name, *cells, "; ".join(notes)])
    return _markdown(["", *(column.title for column in columns), "notes"], rows)


def _growth(runs: Sequence[Run]) -> list[str]:
    counts = {
        run["tensors"]: [other for other in runs if other.get("tensors") == run["tensors"]]
        for run in runs
        if "tensors" in run
    }
    rows = [
        [f"{count:,}", *(column.cell(counts[count], []) for column in GROWTH)] for count in sorted(counts)
    ]
    lines = _markdown(["tensors of 1 KB", *(column.title for column in GROWTH)], rows)
    looks = [
        [
            f"{int(save):,}",
            f"{look['seconds_per_save'] * 1e3:.3g}",
            f"{look['resident_bytes'] / 1e6:,.1f}",
            *(str(look[name]) for name in ("open_files", "threads", "processes")),
        ]
        for run in runs
        for save, look in run.get("looks", {}).items()
    ]
    header = ["saves in a row", "ms a save", "memory MB", "open files", "threads", "processes below"]
    return [*lines, "", *_markdown(header, looks)]


def _markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a table whose columns are aligned, so that it can be read as it is."""
    widths = [max(len(row[place]) for row in (header, *rows)) for place in range(len(header))]
    line = [text.ljust(width) for text, width in zip(header, widths, strict=True)]
    body = [[text.ljust(width) for text, width in zip(row, widths, strict=True)] for row in rows]
    return ["| " + " | ".join(cells) + " |" for cells in (line, ["-" * width for width in widths], *body)]


def _key(name: str, scale: float = 1) -> Value:
    return lambda run: None if run[name] is None else run[name] * scale


def _is_save(index: int) -> Callable[[Run], bool]:
    return lambda run: bool(run["save"] == index)


def _is_cache(cache: str) -> Callable[[Run], bool]:
    return lambda run: bool(run["cache"] == cache)


def _speed(run: Run) -> float:
    return float(run["size_bytes"] / run["seconds"] / 1e9)


def _step_ratio(run: Run) -> float | None:
    during = run["step_seconds_during"]
    return None if during is None else float(during / run["step_seconds"])


COLUMNS: dict[str, list[Column]] = {
    "save": [
        Column(title="durable s", value=_key("seconds"), only=_is_save(1), is_compared=True),
        Column(title="blocked s", value=_key("blocked_seconds"), only=_is_save(1), is_compared=True),
        Column(title="CPU s", value=_key("cpu_seconds"), only=_is_save(1), is_compared=True),
        Column(title="GB/s", value=_speed, only=_is_save(1)),
        Column(title="written MB", value=_key("written_bytes", 1e-6), only=_is_save(1), form=MB),
        Column(title="first save s", value=_key("seconds"), only=_is_save(0)),
    ],
    "load": [
        Column(title="cold s", value=_key("seconds"), only=_is_cache("cold"), is_compared=True),
        Column(title="cold GB/s", value=_speed, only=_is_cache("cold")),
        Column(title="warm s", value=_key("seconds"), only=_is_cache("warm"), is_compared=True),
        Column(title="CPU s", value=_key("cpu_seconds"), only=_is_cache("cold"), is_compared=True),
        Column(title="extra memory MB", value=_key("extra_bytes", 1e-6), form="{:,.0f}".format),
    ],
    "stall": [
        Column(title="blocked s", value=_key("blocked_seconds"), is_compared=True),
        Column(title="lost by training s", value=_key("lost_seconds"), is_compared=True),
        Column(title="durable s", value=_key("seconds"), is_compared=True),
        Column(title="step ms", value=_key("step_seconds", 1e3)),
        Column(title="step ms while writing", value=_key("step_seconds_during", 1e3)),
        Column(title="slower by", value=_step_ratio, form="{:.2f}x".format),
    ],
    "frozen": [
        *(
            Column(title=f"save {n + 1} s", value=_key("seconds"), only=_is_save(n), is_compared=True)
            for n in range(FROZEN_SAVES)
        ),
        *(
            Column(title=f"save {n + 1} MB", value=_key("written_bytes", 1e-6), form=MB, only=_is_save(n))
            for n in range(FROZEN_SAVES)
        ),
    ],
}
GROWTH = [
    Column(title="durable ms", value=_key("seconds", 1e3)),
    Column(title="blocked ms", value=_key("blocked_seconds", 1e3)),
    Column(title="durable us a tensor", value=lambda run: run["seconds"] / run["tensors"] * 1e6),
    Column(title="blocked us a tensor", value=lambda run: run["blocked_seconds"] / run["tensors"] * 1e6),
    Column(title="first save ms", value=_key("seconds_first", 1e3)),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS)
    directory = parser.parse_args().results
    for name in MEASUREMENTS:
        path = directory / f"{name}.json"
        if path.exists():
            results = json.loads(path.read_text())
            print("\n".join([*tables(results), "", machine.one_line(results["machine"])]))


if __name__ == "__main__":
    main()
