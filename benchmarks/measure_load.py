"""Load a checkpoint into live objects in a fresh process, and print what it cost as one line of JSON.

The checkpoint is made by another process before:

python benchmarks/measure_load.py --directory /scratch --peer torch.save --make
python benchmarks/measure_load.py --directory /scratch --peer torch.save --cache cold
"""

from __future__ import annotations

import json
from pathlib import Path

import child
from observe import Watch, drop_cached, fill_cache, peak_bytes, reset_peak, settle
from peers import Peer, build_state, open_peer, wait_until
from states import spec_of, tiny


def save_into(peer: Peer, path: Path) -> None:
    path.mkdir()
    peer.prepare()
    wait_until(peer.save(path))


def load_from(peer: Peer, path: Path) -> None:
    if peer.load is None:
        raise TypeError("this peer is measured by its saves only")
    peer.load(path)


def make(name: str, kind: str, directory: Path, *, is_quick: bool) -> None:
    """Save the state below `directory` and leave beside it what a load must restore."""
    state = build_state(name, spec_of(kind, is_quick=is_quick))
    scratch = child.emptied(directory / "load")
    (directory / "fingerprint.json").write_text(json.dumps(state.fingerprint()))
    with open_peer(name, state, scratch) as peer:
        save_into(peer, scratch / "0")
    child.report(peer=name, state=kind, made=True)


def use_once(name: str, directory: Path) -> None:
    """Save and load next to nothing, so that the library has loaded all that it needs."""
    state = build_state(name, tiny())
    scratch = child.emptied(directory / "first")
    with open_peer(name, state, scratch) as peer:
        save_into(peer, scratch / "0")
    with open_peer(name, state, scratch) as peer:
        load_from(peer, scratch / "0")


def main() -> None:
    arguments = child.parser(__doc__)
    arguments.add_argument("--make", action="store_true", help="only make the checkpoint")
    arguments.add_argument("--cache", choices=("cold", "warm"), default="cold")
    given = arguments.parse_args()
    if given.make:
        make(given.peer, given.state, given.directory, is_quick=given.quick)
        return
    use_once(given.peer, given.directory)
    state = build_state(given.peer, spec_of(given.state, is_quick=given.quick))
    state.clear()
    scratch = given.directory / "load"
    with open_peer(given.peer, state, scratch) as peer:
        was_quiet = settle(state.size_bytes, given.quiet_wait)
        if given.cache == "cold":
            cached_by = drop_cached(scratch)
        else:
            fill_cache(scratch)
            cached_by = "reading it once"
        resident = reset_peak()
        with Watch() as watch:
            load_from(peer, scratch / "0")
        extra_bytes = peak_bytes() - resident
    expected, found = json.loads((given.directory / "fingerprint.json").read_text()), state.fingerprint()
    if found != expected:
        raise ValueError(f"{given.peer}: the state after the load is not the one that was saved")
    child.report(
        peer=given.peer,
        state=given.state,
        size_bytes=state.size_bytes,
        tensors=state.tensor_count,
        cache=given.cache,
        cached_by=cached_by,
        seconds=watch.cost.seconds,
        cpu_seconds=watch.cost.cpu_seconds,
        extra_bytes=extra_bytes,
        others_cores=watch.cost.others_cores,
        was_quiet=was_quiet,
    )


if __name__ == "__main__":
    main()
