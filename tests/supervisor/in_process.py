"""Commands that only look, called without a process of their own: that takes a hundredth of the time."""

from __future__ import annotations

import io
import json
import os
from contextlib import chdir, redirect_stderr, redirect_stdout
from subprocess import CompletedProcess
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from unbroken.cli.main import main

if TYPE_CHECKING:
    from .conftest import Bench


def look(bench: Bench, *arguments: str) -> CompletedProcess[str]:
    """Return what the command line says from the place of `bench`."""
    out, err = io.StringIO(), io.StringIO()
    environment = patch.dict(os.environ, bench.environment, clear=True)
    with chdir(bench.place), environment, redirect_stdout(out), redirect_stderr(err):
        code = main(arguments)
    return CompletedProcess(arguments, code, out.getvalue(), err.getvalue())


def status(bench: Bench) -> dict[str, Any]:
    """Return what `status --json` says of the run of `bench`."""
    done = look(bench, "status", "it", "--json")
    assert done.returncode == 0, done.stderr
    value: dict[str, Any] = json.loads(done.stdout)
    return value
