"""The examples, rehearsed as a user would: killed at every kind of moment, and proven bit-identical."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
# Steps in an epoch of each; kills at the end of the first and after it belong to the rehearsal.
EPOCH = {"digits": 45, "characters": 106, "keras_fit": 45, "tensorflow_loop": 45}
MOMENTS = ("after-step", "in-step", "in-save", "in-evaluation", "end-of-epoch", "in-step")
SIGNALS = ("SIGKILL", "SIGTERM", "SIGKILL", "SIGKILL", "SIGKILL", "SIGINT")


@pytest.mark.chaos
@pytest.mark.parametrize("example", list(EPOCH))
def test_an_example_is_proven_over_a_kill_of_every_kind(tmp_path: Path, example: str) -> None:
    epoch = EPOCH[example]
    # Twice in the first epoch, around its end (where the two moments come in turn), and in the second.
    steps = (5, 9, epoch - 12, epoch - 6, 2 * epoch - 6, 2 * epoch + 3)
    kills = list(zip(steps, MOMENTS, SIGNALS, strict=True))
    chosen = [word for kill in kills for word in ("--at", ":".join(map(str, kill)))]
    page = tmp_path / "drill.html"
    drill = [sys.executable, "-P", "-m", "unbroken.cli.main", "drill", "--steps", str(2 * epoch + 8), *chosen]
    script = [sys.executable, str(EXAMPLES / example / "train.py"), "--epochs", "3"]

    done = subprocess.run(
        [*drill, "--json", "--html", str(page), "--", *script],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["headline"].startswith("PROVEN: bit-identical over 6 kills")
    ended = [process["kill"] for process in found["processes"] if process["killed"]]
    assert [(kill["moment"], kill["signal"]) for kill in ended] == list(zip(MOMENTS, SIGNALS, strict=True))
    assert found["missed"] == []
    assert found["restored"] == 6
    assert found["components"] > 20
    assert found["unkept"] == {}
    assert found["headline"] in page.read_text()
    # The run of the user would have been begun here.
    assert list(tmp_path.iterdir()) == [page]
