"""Which checkpoint of several a trainer would take: what a file points to, or that of the highest number.

Neither says that it is whole.
"""

from __future__ import annotations

import re
from pathlib import Path

from unbroken.inspection.formats.base import RegularFile, damaged
from unbroken.storage.failures import translated

# Of Hugging Face's trainer, and of Accelerate.
NUMBERED = re.compile(r"checkpoint([-_])([0-9]{1,15})")
# Of Orbax, and of scripts that call a checkpoint after its step alone.
STEP = re.compile(r"[0-9]{1,15}")
_LONGEST_POINTER_BYTES = 512
_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.=-]{0,254}")
_DEEPSPEED, _MEGATRON = "latest", "latest_checkpointed_iteration.txt"


def numbered(directory: Path, called: re.Pattern[str] = NUMBERED) -> dict[int, Path]:
    """Return the folders in `directory` that are `called` after a number, by it, in its order."""
    with translated("list", str(directory)):
        found = [path for path in directory.iterdir() if called.fullmatch(path.name) and path.is_dir()]
    return dict(sorted((number_of(path), path) for path in found))


def number_of(folder: Path) -> int:
    """Return the number in the name of such a folder."""
    return int(re.sub("[^0-9]", "", folder.name))


def pointer_in(directory: Path) -> Path | None:
    """Return the file in `directory` that names its last checkpoint, None if there is none."""
    for name in (_DEEPSPEED, _MEGATRON):
        file = directory / name
        if file.is_file() and not file.is_symlink():
            return file
    return None


def pointed_to(pointer: Path) -> Path:
    """Return the directory that a pointer names. Raises DamagedError if there is none."""
    file = RegularFile(pointer)
    text = (
        bytes(file.read(0, min(file.size_bytes, _LONGEST_POINTER_BYTES))).decode("utf-8", "replace").strip()
    )
    name = f"iter_{int(text):07d}" if pointer.name == _MEGATRON and text.isdecimal() else text
    if not _PLAIN.fullmatch(name):
        raise damaged(str(pointer), "the name of a directory beside it", name[:80] or "nothing")
    target = pointer.parent / name
    if not target.is_dir():
        raise damaged(str(pointer), f"{name}, which it names", "no such directory")
    return target
