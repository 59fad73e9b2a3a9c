"""Drills of scripts that run in processes which have torch already."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).parent / "scripts"
TUTORIAL = Path(__file__).parents[2] / "docs/tutorial/prove-it.md"
COMMAND = [sys.executable, "-P", "-m", "unbroken.cli.main", "drill", "--json"]


def drill(command: list[str], place: Path, *arguments: str) -> dict[str, Any]:
    temporary = place / "temporary"
    temporary.mkdir(exist_ok=True)
    environment = {**os.environ, "TMPDIR": str(temporary), "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONHASHSEED", None)
    done = subprocess.run(
        [*COMMAND, *arguments, "--", *command],
        cwd=place,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert done.stdout, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    # torch leaves an empty folder there.
    assert not [path for path in temporary.iterdir() if path.name.startswith("unbroken")]
    assert not (place / "runs").exists()
    return found


def forked(socket: Path, script: Path, *arguments: str) -> list[str]:
    # Isolated and without site-packages it starts in a few milliseconds.
    ask = [sys.executable, "-I", "-S", str(SCRIPTS / "forked.py"), str(socket)]
    return [*ask, str(script), *arguments]


def snippets(page: Path) -> list[str]:
    """The scripts that a page shows."""
    return re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
