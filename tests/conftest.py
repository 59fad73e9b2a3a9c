"""For all tests: no trace of a supervisor around us, and no state of the user's machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from unbroken.rundir import layout


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.delenv(layout.RUN_DIR_VARIABLE, raising=False)
    monkeypatch.delenv(layout.ATTEMPT_VARIABLE, raising=False)
    state_home: Path = tmp_path_factory.getbasetemp() / "state-home"
    monkeypatch.setenv("XDG_STATE_HOME", str(state_home))
