"""The whole demo, as `make demo` runs it; long, so it stands with the chaos tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

DEMO = Path(__file__).resolve().parents[2] / "demo" / "run_demo.py"


@pytest.mark.chaos
@pytest.mark.parametrize("example", ["digits", "characters"])
def test_the_demo_ends_bit_identical(tmp_path: Path, example: str) -> None:
    done = subprocess.run(
        [sys.executable, str(DEMO), "--example", example, "--output", str(tmp_path / "out")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("bit-identical: ")
    assert "<svg" in (tmp_path / "out" / "loss-curve.html").read_text()
