"""The script of saves and snapshots as a process of its own; without a framework it starts quickly."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).with_name("saving_script.py")


def start(run_dir: Path, *arguments: str, output: Path) -> subprocess.Popen[str]:
    """Start the script; what it prints goes to the file `output`."""
    command = [sys.executable, "-W", "ignore", str(SCRIPT), str(run_dir), *arguments]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("UNBROKEN_")}
    with output.open("w") as file:
        return subprocess.Popen(command, stdout=file, stderr=file, env=environment, text=True)


def finish(run_dir: Path, *arguments: str, output: Path, code: int = 0) -> str:
    """Run the script to its end, which must be of that exit code, and return what it printed."""
    process = start(run_dir, *arguments, output=output)
    assert process.wait(timeout=120) == code, output.read_text()
    return output.read_text()
