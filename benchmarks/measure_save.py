"""Save a state a few times in this process, and print what each save cost as one line of JSON.

python benchmarks/measure_save.py --directory /scratch --state gpt --peer torch.save
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import child
from observe import Watch, disk_bytes, settle
from peers import Peer, build_state, open_peer, wait_until
from states import State, spec_of


def save_once(peer: Peer, path: Path, *, state: State, quiet_wait: float) -> dict[str, Any]:
    """Save into `path` in a quiet moment; `seconds` last until every byte and name is durable."""
    path.mkdir()
    before = disk_bytes(path.parent)
    was_quiet = settle(state.size_bytes, quiet_wait)
    with Watch() as watch:
        is_durable = peer.save(path)
        blocked = watch.lap()
        wait_until(is_durable)
    cost = watch.cost
    return {
        "seconds": cost.seconds,
        "blocked_seconds": blocked,
        "cpu_seconds": cost.cpu_seconds,
        "written_bytes": cost.written_bytes,
        "disk_bytes": disk_bytes(path.parent) - before,
        "others_cores": cost.others_cores,
        "was_quiet": was_quiet,
    }


def main() -> None:
    arguments = child.parser(__doc__)
    arguments.add_argument("--saves", type=int, default=2)
    given = arguments.parse_args()
    state = build_state(given.peer, spec_of(given.state, is_quick=given.quick))
    scratch = child.emptied(given.directory / "save")
    with open_peer(given.peer, state, scratch) as peer:
        peer.prepare()
        saves = []
        for index in range(given.saves):
            saves.append(save_once(peer, scratch / f"{index}", state=state, quiet_wait=given.quiet_wait))
            # Otherwise nothing would have changed since, and whoever notices that need not write at all.
            state.train()
    shutil.rmtree(scratch)
    child.report(
        peer=given.peer,
        state=given.state,
        size_bytes=state.size_bytes,
        tensors=state.tensor_count,
        saves=saves,
    )


if __name__ == "__main__":
    main()
