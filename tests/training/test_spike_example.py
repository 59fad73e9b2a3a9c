"""The example with a broken file: the run gets past its loss spikes unattended, and tells why they came."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from unbroken.rundir.journal import read_events
from unbroken.rundir.layout import events_file

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "spike" / "train.py"


@pytest.fixture
def train(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Run the example in this process; return the accuracy of its last epoch, and what it did."""

    def run(directory: Path, *options: str) -> tuple[float, dict[str, list[dict[str, Any]]], list[int]]:
        monkeypatch.setattr(
            sys, "argv", [str(SCRIPT), "--run-dir", str(directory), "--epochs", "1", *options]
        )
        broken = runpy.run_path(str(SCRIPT), run_name="__main__")["BROKEN"]
        found: dict[str, list[dict[str, Any]]] = {}
        for event in read_events(directory / "attempts" / "0001" / events_file()):
            found.setdefault(event["kind"], []).append(event)
        return float(capsys.readouterr().out.split()[-1]), found, list(broken)

    return run


def test_a_broken_file_is_found_and_left_out_and_training_ends_well(tmp_path: Path, train: Any) -> None:
    accuracy, found, broken = train(tmp_path / "with")

    assert accuracy > 0.8
    assert max(event["metrics"]["loss"] for event in found["step"][-10:]) < 3
    (skipped,), (replayed,), (rolled_back,) = (found[kind] for kind in ("skipped", "replayed", "rolled-back"))
    (samples,) = skipped["samples"]
    assert set(broken) < set(samples)
    assert (replayed["samples"], replayed["same"]) == (samples, True)
    assert rolled_back["in_process"]
    assert rolled_back["tainted"] == []
    assert found["completed"][0]["step"] == 45 - 1

    # Without a watch the same data spoils the model for good.
    spoiled, _, _ = train(tmp_path / "without", "--health", "off", "--save-every", "1000")
    assert spoiled < 0.2
