"""Copies of a run directory, to go back to, and of a directory that a script works in."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path

from unbroken.errors import UsageError
from unbroken.rundir import layout

# Of what an observed script works in: several copies of it are made.
MOST_BYTES = 512 << 20
# What makes a directory a virtual environment, which is large, and of no interest.
_ENVIRONMENT = "pyvenv.cfg"
_LINKED = (".git", "node_modules")


def copy_run(source: Path, target: Path) -> None:
    """Make `target` what `source` is, which may be nothing at all. No process may be at work in either."""
    if target.exists():
        shutil.rmtree(target)
    if not source.exists():
        return
    shutil.copytree(source, target, symlinks=True, copy_function=_copy)


def copy_work(source: Path, target: Path) -> None:
    """Make `target` what `source` is, with nothing in common."""
    if target.exists():
        shutil.rmtree(target)
    shutil.copytree(source, target, symlinks=True)


def first_copy(source: Path, target: Path, *, shared: Collection[Path], skipped: Path) -> None:
    """Copy the user's directory `source` to `target`, without `skipped`; `shared` is linked to, not copied.

    So are virtual environments and the like. Raises UsageError if more than `MOST_BYTES` are to be copied.
    """
    target.mkdir(parents=True)
    sizes: Counter[str] = Counter()
    for entry in _entries(source, {path.absolute() for path in shared}, skipped):
        path = Path(entry.path)
        there = target / path.relative_to(source)
        if _is_linked(path, shared):
            there.symlink_to(path.absolute())
        elif entry.is_symlink():
            there.symlink_to(_link(path, source))
        elif entry.is_dir():
            there.mkdir()
        elif entry.is_file():
            sizes[there.relative_to(target).parts[0]] += entry.stat().st_size
            _check(sizes, source)
            shutil.copy2(path, there)


def _entries(directory: Path, linked: Collection[Path], skipped: Path) -> Iterator[os.DirEntry[str]]:
    with os.scandir(directory) as entries:
        for entry in sorted(entries, key=lambda one: one.name):
            path = Path(entry.path)
            if path.absolute() == skipped.absolute():
                continue
            yield entry
            if entry.is_dir(follow_symlinks=False) and not _is_linked(path, linked):
                yield from _entries(path, linked, skipped)


def _is_linked(path: Path, shared: Collection[Path]) -> bool:
    return path.absolute() in shared or path.name in _LINKED or (path / _ENVIRONMENT).exists()


def _link(path: Path, source: Path) -> str:
    """Return where the copy of a link leads: where the link does, if that is not copied with it."""
    text = os.readlink(path)
    leads_to = os.path.normpath(path.parent / text)
    return text if Path(leads_to).is_relative_to(source) else leads_to


def _check(sizes: Counter[str], source: Path) -> None:
    if sizes.total() > MOST_BYTES:
        largest = sizes.most_common(1)[0][0]
        raise UsageError(
            f"{source}: expected at most {MOST_BYTES >> 20} MiB to copy, found more, most of it in {largest}",
            hint=f"the script works in a copy; what it only reads can stay where it is: --share {largest}",
        )


def _copy(source: str, target: str) -> None:
    # What is committed never changes, and may be large.
    if layout.parse_checkpoint_name(Path(source).parent.name) is not None:
        os.link(source, target)
    else:
        shutil.copy2(source, target)
