"""What a training of several ranks leaves, and what it has to be like."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ..zygote import run_script

SCRIPT = Path(__file__).with_name("training_script.py")


class Trained:
    """What a run of the script has left, attempt after attempt."""

    def __init__(self, place: Path, world: int = 2) -> None:
        self.run, self.out = place / "run", place / "out"
        self.world = world
        self.said = ""

    def go(self, world: int | None = None, **options: Any) -> Trained:
        self.out.mkdir(parents=True, exist_ok=True)
        words = [f"{name}={json.dumps(value)}" for name, value in options.items()]
        done = run_script(
            SCRIPT, str(self.run), str(self.out), str(world or self.world), *words, output=self.out / "said"
        )
        self.code, self.said = done.returncode, done.stderr
        return self

    @property
    def codes(self) -> list[int]:
        found: list[int] = json.loads((self.out / "codes.json").read_text())
        return found

    def last(self, rank: int) -> str:
        return (self.out / f"{rank}.txt").read_text()

    def steps(self, rank: int) -> dict[int, dict[str, Any]]:
        """Return what a rank saw in each step, the last time that it did that."""
        lines = [json.loads(line) for line in (self.out / f"{rank}.jsonl").read_text().splitlines()]
        return {line["step"]: line for line in lines}


def assert_as(trained: Trained, expected: Trained) -> None:
    for rank in range(expected.world):
        assert trained.steps(rank) == expected.steps(rank)
        assert trained.last(rank) == expected.last(rank)


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """What two ranks leave that nothing happens to."""
    return Trained(tmp_path_factory.mktemp("reference")).go()
