"""For all tests: no trace of a supervisor around us, and no state of the user's machine."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import pytest

from unbroken.rundir import layout


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.delenv(layout.RUN_DIR_VARIABLE, raising=False)
    monkeypatch.delenv(layout.ATTEMPT_VARIABLE, raising=False)
    base = tmp_path_factory.getbasetemp()
    monkeypatch.setenv("XDG_STATE_HOME", str(base / "state-home"))
    # Of all workers of these tests. What processes that are killed leave in there goes with it.
    temporary = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "tmp"
    temporary.mkdir(exist_ok=True)
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))


@pytest.fixture(autouse=True)
def _collectives_of_its_own() -> None:
    """Strategies of one process have the same keys: TensorFlow takes sums of one for those of another."""
    loaded = sys.modules.get("tensorflow.python.distribute.mirrored_strategy")
    if loaded is not None:
        loaded.MirroredStrategy._collective_key_base += 100_000


# Here parameters are many ways of one thing, each of them a training or several: of these every third is in
# the ordinary tests, and all of them in the long ones.
_MANY_WAYS = {"cases", "drill", "frameworks", "handover", "keras", "matrix", "tensorflow", "training"}
_ORDINARY = 3


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave most of many parameters to the long tests."""
    ways: dict[tuple[Path, str], int] = {}
    for item in items:
        if item.path.parent.name not in _MANY_WAYS or not hasattr(item, "callspec"):
            continue
        if item.get_closest_marker("chaos") is None:
            key = item.path, item.nodeid.partition("[")[0]
            ways[key] = ways.get(key, 0) + 1
            if (ways[key] - 1) % _ORDINARY:
                item.add_marker(pytest.mark.chaos)
