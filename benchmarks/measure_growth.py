"""How the cost of a save grows with the number of tensors and of saves: one line of JSON.

python benchmarks/measure_growth.py --directory /scratch --tensors 1000
python benchmarks/measure_growth.py --directory /scratch --in-a-row 1000
"""

from __future__ import annotations

import os
import shutil
import statistics
import threading
import time
from pathlib import Path
from typing import Any

import child
from measure_save import save_once
from observe import descendants, resident_bytes
from peers import OURS, open_peer, wait_until
from peers_unbroken import JournalTail
from states import many
from torch_state import TorchState, build, build_model

import unbroken

SAVES = 7
FIRST_LOOK = 100


def with_tensors(count: int, scratch: Path, quiet_wait: float) -> dict[str, Any]:
    """Save a model of `count` parameters a few times; the first save, which prepares, is left out."""
    state = TorchState({"model": build_model(many(count))})
    saves = []
    with open_peer(OURS, state, scratch) as peer:
        peer.prepare()
        for index in range(SAVES):
            saves.append(save_once(peer, scratch / f"{index}", state=state, quiet_wait=quiet_wait))
            state.train()
    seconds, blocked = (
        statistics.median(save[key] for save in saves[1:]) for key in ("seconds", "blocked_seconds")
    )
    return {
        "tensors": count,
        "size_bytes": state.size_bytes,
        "seconds": seconds,
        "blocked_seconds": blocked,
        "seconds_first": saves[0]["seconds"],
        "was_quiet": all(save["was_quiet"] for save in saves),
    }


def in_a_row(count: int, scratch: Path) -> dict[str, Any]:
    """Save `count` times in one run that prunes as it does by default, and see what has grown."""
    state = build(many(50))
    looks: dict[str, Any] = {}
    with unbroken.Run(scratch / "run", save=[], **state.parts) as run:
        journal = JournalTail(run)
        began, since = time.perf_counter(), 0
        for index in range(1, count + 1):
            state.train()
            run.step()
            run.save()
            wait_until(journal.has_saved)
            if index in (min(FIRST_LOOK, count // 10), count):
                elapsed = time.perf_counter() - began
                looks[f"{index}"] = {**_look(), "seconds_per_save": elapsed / (index - since)}
                began, since = time.perf_counter(), index
    return {"in_a_row": count, "size_bytes": state.size_bytes, "looks": looks}


def _look() -> dict[str, int]:
    return {
        "resident_bytes": resident_bytes(),
        "open_files": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "processes": len(descendants(os.getpid())),
    }


def main() -> None:
    arguments = child.parser(__doc__)
    what = arguments.add_mutually_exclusive_group(required=True)
    what.add_argument("--tensors", type=int)
    what.add_argument("--in-a-row", type=int)
    given = arguments.parse_args()
    scratch = child.emptied(given.directory / "growth")
    if given.tensors:
        found = with_tensors(given.tensors, scratch, given.quiet_wait)
    else:
        found = in_a_row(given.in_a_row, scratch)
    shutil.rmtree(scratch)
    child.report(peer=OURS, **found)


if __name__ == "__main__":
    main()
