from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A small file system of its own with no byte left, but room for names."""
    place = tmp_path / "full disk"
    place.mkdir()
    if os.geteuid() != 0:
        pytest.skip("a full disk is mounted for this test, and only root may mount")
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(place)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"a full disk cannot be mounted here: {done.stderr.strip()}")
    try:
        with pytest.raises(OSError), (place / "filler").open("wb", buffering=0) as filler:
            while True:
                filler.write(b"x" * 4096)
        yield place
    finally:
        # Lazily: what a failed test still has open must not keep the mount.
        subprocess.run(["umount", "--lazy", str(place)], check=True)
