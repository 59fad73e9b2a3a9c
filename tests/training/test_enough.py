"""A loop over epochs that is over early, because a part says so."""

from __future__ import annotations

from pathlib import Path

import unbroken


def test_a_loop_that_has_had_enough_is_over_in_every_process(tmp_path: Path) -> None:
    for _ in range(2):
        known = {"is_enough": False}
        with unbroken.Run(tmp_path, known=known) as run:
            for epoch in run.epochs(5, until=lambda known=known: known["is_enough"]):
                run.step()
                known["is_enough"] = epoch == 1
            assert run.step_count == 2
