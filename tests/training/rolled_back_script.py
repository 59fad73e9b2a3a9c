"""A run that goes back, killed at one of the effects of that.

    python rolled_back_script.py RUN_DIR KIND MOMENT

With the KIND "here" a weight goes bad once, with "there" it is data, and another process goes back.
MOMENT is such as "before:go_back" or "after:quarantine": there the process kills itself, when it comes to it
first since the roll-back began. With "never" it runs to its end.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.training.rolled_back import SIZE, spoilt_once, train
from unbroken.checkpoint.store import CheckpointStore
from unbroken.training.health import recovery
from unbroken.training.health.lowering import Lowering
from unbroken.training.passes import Pass
from unbroken.training.resume import Restoring
from unbroken.training.saver import Saver
from unbroken.training.whole_state import WholeState

# In the order in which they begin first.
EFFECTS: dict[str, Any] = {
    "add_rollback": recovery,
    "forget_copies": Saver,
    "do": Restoring,
    "go_back": WholeState,
    "go_on_with": Pass,
    "quarantine": CheckpointStore,
    "begin_from": Saver,
    "point_latest": recovery,
    "say_gone_back": recovery,
    "follow": Lowering,
    "say_left_out": recovery.Recovery,
}


def dying(name: str, act: Callable[..., Any], moment: str, seen: list[str]) -> Callable[..., Any]:
    """Return `act`, before or after which this process dies if that is the moment; `seen` have begun."""

    def wrapped(*arguments: Any, **options: Any) -> Any:
        if seen or name == "add_rollback":
            seen.extend({name}.difference(seen))
            die(f"before:{name}")
        found = act(*arguments, **options)
        if seen:
            die(f"after:{name}")
        return found

    def die(at: str) -> None:
        if at == moment:
            os.kill(os.getpid(), signal.SIGKILL)

    return wrapped


def main() -> None:
    directory, kind, moment = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    seen: list[str] = []
    for name, place in EFFECTS.items():
        setattr(place, name, dying(name, getattr(place, name), moment, seen))
    options: dict[str, Any] = {"trouble": spoilt_once()}
    if kind == "there":
        options = {"bad": [5 * SIZE], "allow": ["model.nothing"]}
    train(directory, "ordered", epochs=1, save_every=1, **options)
    print("effects", *seen)


if __name__ == "__main__":
    main()
