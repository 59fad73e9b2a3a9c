"""One attempt over each of several pipelines, in a fresh process: DIRECTORY CASES LEDGERS."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests import quiet_tensorflow  # noqa: F401
from tests.tensorflow.pipelines import PIPELINES, consumed

directory, cases, ledgers = map(Path, sys.argv[1:])
found = [
    consumed(directory / f"run-{number}", PIPELINES[name](), stop_at=stop_at, most=most)
    for number, (name, most, stop_at) in enumerate(json.loads(cases.read_text()))
]
ledgers.write_text(json.dumps(found))
