"""The demo is a folder of scripts, not a package: its modules are found the way its own script finds them."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "demo"))
