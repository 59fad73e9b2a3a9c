"""What is found on one rank is found on all; and what is being written when a run goes back is kept."""

from __future__ import annotations

import json
import math
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from torch.utils.data import DataLoader

import unbroken
from unbroken.handover.committer import Committed, Committer
from unbroken.handover.slots import SlotReader
from unbroken.training.health.agreement import agreement, worst
from unbroken.training.health.findings import Finding
from unbroken.training.ranks.group import Group
from unbroken.training.saver import Saver

from ..zygote import run_script
from .runs import names


def finding(step: int, **changed: object) -> Finding:
    found = Finding(
        kind="spike", step=step, first_step=step - 1, trusted_step=step - 3, text="loss 9", action="roll-back"
    )
    return replace(found, **changed)  # type: ignore[arg-type]


def test_a_run_that_goes_back_lets_the_checkpoint_in_hand_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_bad, is_acted_upon = threading.Event(), threading.Event()
    commit, wait, forget = Committer.commit, Saver.wait, Saver.forget_copies

    def late(committer: Committer, slot: SlotReader) -> Committed:
        found = slot.read()
        assert found is not None
        assert found.snapshot.description.step < 2 or is_acted_upon.wait(timeout=60)
        return commit(committer, slot)

    def wait_and_let_go(saver: Saver) -> bool:
        if is_bad.is_set():
            is_acted_upon.set()
        return wait(saver)

    def forget_and_let_go(saver: Saver) -> None:
        forget(saver)
        is_acted_upon.set()

    monkeypatch.setattr(Committer, "commit", late)
    monkeypatch.setattr(Saver, "wait", wait_and_let_go)
    monkeypatch.setattr(Saver, "forget_copies", forget_and_let_go)
    with unbroken.Run(
        tmp_path, save=[unbroken.EverySteps(2)], keep=[], health=unbroken.Health(), counters={"n": 0}
    ) as run:
        for _ in run.epochs(1):
            for batch in run.batches(DataLoader(range(5), batch_size=1)):
                if batch == 2:
                    # The save of step 2 is in hand, and stays so until the finding is acted upon.
                    is_bad.set()
                run.step(loss=math.nan if batch == 2 else 1.0)
    assert "step-00000002" in names(tmp_path)
    assert run.step_count == 4


@pytest.mark.chaos
def test_a_nan_on_one_of_two_ranks_is_the_finding_of_both(tmp_path: Path) -> None:
    done = run_script(
        Path(__file__).with_name("health_ranks_script.py"), str(tmp_path), output=tmp_path / "out"
    )
    assert done.returncode == 0, done.stderr
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert first == second
    assert [(one["step"], one["kind"], one["text"]) for one in first][:2] == [
        (10, "non-finite", "rank 1: loss nan at step 10"),
        (11, "non-finite", "rank 1: the loss and the gradients are finite again"),
    ]
    at_20 = next(one for one in first if one["step"] == 20)
    # Of two that ask for the same it is the worse, and the older state is the one that both can trust.
    assert (at_20["kind"], at_20["first_step"], at_20["trusted_step"]) == ("non-finite", 20, 18)


def test_the_worst_action_decides_and_the_findings_that_ask_for_it_share_their_steps() -> None:
    told = finding(30, action="warn", first_step=1, trusted_step=0)
    agreed = worst([told, None, finding(30), finding(30, kind="non-finite", first_step=30, trusted_step=29)])
    assert agreed is not None
    assert (agreed.kind, agreed.action, agreed.text) == ("non-finite", "roll-back", "rank 3: loss 9")
    assert (agreed.first_step, agreed.step, agreed.trusted_step) == (29, 30, 27)
    assert worst([None, None]) is None


def test_a_process_that_trains_alone_asks_nobody() -> None:
    assert agreement(Group()) is None
