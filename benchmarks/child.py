"""What every measuring process shares: its arguments, its scratch directory and the line it prints."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

from peers import ENTRIES
from states import STATES


def parser(description: str | None) -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(description=description)
    arguments.add_argument("--directory", type=Path, required=True, help="where it may write; it must exist")
    arguments.add_argument("--state", choices=STATES, default=STATES[0])
    arguments.add_argument("--peer", choices=list(ENTRIES), default="unbroken")
    arguments.add_argument("--quick", action="store_true", help="a state about fifty times smaller")
    arguments.add_argument("--quiet-wait", type=float, default=25, metavar="SECONDS")
    return arguments


def emptied(path: Path) -> Path:
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()
    return path


def report(**record: Any) -> None:
    """Print the one line of data; everything else on stdout would be taken for noise."""
    print(json.dumps(record), flush=True)
