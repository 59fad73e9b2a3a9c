"""One process with torch for all drills of a session: importing it takes longer than the training."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from .forking import SCRIPTS


@pytest.fixture(scope="session")
def socket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where to ask for processes that have torch already."""
    place = tmp_path_factory.mktemp("forks") / "socket"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    arguments = [sys.executable, "-P", str(SCRIPTS / "forked.py"), str(place)]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, env=environment) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == "ready\n"
        yield place
        server.kill()
