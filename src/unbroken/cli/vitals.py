"""How a run does, in words: how far it is, what it has lost, and what it uses."""

from __future__ import annotations

from typing import Any

from unbroken.cli import output
from unbroken.cli.describe import is_current

_LOSSES = {
    "redoing": "redone",
    "pauses": "in pauses",
    "starting": "starting again",
    "ending": "from last steps to ends",
}
_COLOURS = {"running": "green", "done": "green", "held": "red", "lost": "red", "unreadable": "red"}
# Growth below is noise.
_SHOWN_GROWTH_BYTES_PER_HOUR = 1e6
_SHOWN_SECONDS = 0.1
_FEW_INODES = 100_000


def lines(run: dict[str, Any]) -> dict[str, str]:
    """Return what is known of a run's course and resources, as short texts by their names."""
    totals, used = run["totals"], run["resources"] if is_current(run) else None
    found = {"speed": speed(run), "lost": _lost(totals) if totals is not None else ""}
    if used is not None:
        found |= {
            "data": _waiting(used),
            "processor": _processor(used),
            "memory": _memory(used),
            "disk": _disk(used),
        }
    for gpu in run["gpus"] or []:
        found[f"gpu {gpu['index']}" if gpu["index"] is not None else "gpu"] = _gpu(gpu)
    if used is not None:
        found["attention"] = "\n".join(alarm for alarm in used["alarms"] if alarm != run["hint"])
    return found


def progress(run: dict[str, Any]) -> str:
    """Return the step of a run, and of how many if that is known."""
    if run["step"] is None:
        return ""
    return f"{run['step']} of {run['goal_step']}" if run["goal_step"] else str(run["step"])


def attempt(run: dict[str, Any]) -> str:
    """Return which attempt of a run is the last, its process, and how often it was restarted."""
    if run["attempt"] is None:
        return ""
    process = f", process {run['process_id']}" if run["process_id"] is not None else ""
    count = run["restarts"]
    restarts = f", restarted {'once' if count == 1 else f'{count} times'}" if count else ""
    return f"{run['attempt']}{process}{restarts}"


def colour(state: str) -> str:
    """Return the colour of a state of a run."""
    return _COLOURS.get(state, "yellow")


def to_go(run: dict[str, Any]) -> str:
    """Return how long the run still takes, at its rate with all that it lost so far."""
    totals = run["totals"]
    known = totals is not None and totals["to_go_seconds"] is not None
    return output.duration(totals["to_go_seconds"]) if known and totals is not None else ""


def rate(steps_per_second: float | None) -> str:
    """Return a pace for people: steps a second, or seconds a step of a slow one.

    >>> rate(12.345), rate(0.25), rate(0.0)
    ('12.3 steps/s', '4.0s a step', '0 steps/s')
    """
    if steps_per_second is None:
        return ""
    if 0 < steps_per_second < 1:
        return f"{output.duration(1 / steps_per_second)} a step"
    return f"{steps_per_second:.3g} steps/s"


def speed(run: dict[str, Any]) -> str:
    """Return how fast a run is: now, over all, and when it is done at that."""
    now = run["resources"]["steps_per_second"] if is_current(run) else None
    over_all = run["totals"]["steps_per_second"] if run["totals"] is not None else None
    found = [rate(now) and f"{rate(now)} now", rate(over_all) and f"{rate(over_all)} over all"]
    left = to_go(run)
    return ", ".join(text for text in found if text) + (f"; {left} to go" if left else "")


def _lost(totals: dict[str, Any]) -> str:
    if (totals["lost_seconds"] or 0.0) < _SHOWN_SECONDS:
        return ""
    seconds = {word: totals["lost"][name] for name, word in _LOSSES.items()}
    parts = [f"{output.duration(s)} {word}" for word, s in seconds.items() if s >= _SHOWN_SECONDS]
    return ": ".join([output.duration(totals["lost_seconds"]), *([", ".join(parts)] if parts else [])])


def _waiting(used: dict[str, Any]) -> str:
    share = used["data_wait_share"]
    return f"training waits for batches {share:.0%} of its time" if share is not None else ""


def _processor(used: dict[str, Any]) -> str:
    if used["cpu_cores"] is None:
        return ""
    return f"{used['cpu_cores']:.1f} of {used['cpu_count']} cores, {used['processes']} processes"


def _memory(used: dict[str, Any]) -> str:
    if used["memory_bytes"] is None:
        return ""
    growth = used["memory_growth_bytes_per_hour"] or 0.0
    grows = growth >= _SHOWN_GROWTH_BYTES_PER_HOUR
    text = output.size(used["memory_bytes"]) + (f", growing by {output.size(int(growth))}/h" if grows else "")
    if used["memory_left_bytes"] is None:
        return text
    left, limit = output.size(used["memory_left_bytes"]), output.size(used["memory_limit_bytes"])
    return f"{text}; {left} of {limit} left ({used['memory_limit']}){_full(used['memory_full_in_seconds'])}"


def _disk(used: dict[str, Any]) -> str:
    if used["disk_free_bytes"] is None:
        return ""
    free, size = output.size(used["disk_free_bytes"]), output.size(used["disk_size_bytes"])
    inodes = used["inodes_free"]
    few = f", {inodes} inodes" if inodes is not None and inodes < _FEW_INODES else ""
    return f"{free} of {size} free{few}{_full(used['disk_full_in_seconds'])}"


def _full(seconds: float | None) -> str:
    # Years are no forecast.
    return f", used up in {output.duration(seconds)}" if seconds is not None and seconds < 90 * 86400 else ""


def _gpu(gpu: dict[str, Any]) -> str:
    if gpu["problem"]:
        return str(gpu["problem"])
    memory = f"{output.size(gpu['memory_bytes'])} of {output.size(gpu['memory_total_bytes'])}"
    busy = f"{gpu['utilization']:.0%} busy, " if gpu["utilization"] is not None else ""
    return f"{gpu['name']}: {busy}{memory}"
