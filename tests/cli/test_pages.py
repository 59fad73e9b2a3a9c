"""Pages are written where a user says, whole, and never over a file that is something else."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from unbroken.cli import pages
from unbroken.cli.main import main
from unbroken.errors import StorageError, UsageError

PAGE = '<!doctype html>\n<html lang="en"></html>\n'


@pytest.mark.parametrize("old", [None, "", "<!DOCTYPE HTML><html></html>"])
def test_a_page_replaces_a_page_or_nothing(tmp_path: Path, old: str | None) -> None:
    path = tmp_path / "page.html"
    if old is not None:
        path.write_text(old)
    pages.write(path, PAGE)
    assert (path.read_text(), os.listdir(tmp_path)) == (PAGE, ["page.html"])


def test_a_link_to_a_page_stays_one(tmp_path: Path) -> None:
    link = tmp_path / "link.html"
    link.symlink_to(tmp_path / "page.html")
    pages.write(link, PAGE)
    assert link.is_symlink()
    assert (tmp_path / "page.html").read_text() == PAGE


def test_a_pipe_is_written_to(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pages.write, args=(pipe, PAGE))
    writer.start()
    assert pipe.read_text() == PAGE
    writer.join()


def test_a_file_that_is_something_else_is_left_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = tmp_path / "weights.bin"
    weights.write_bytes(b"of a month")
    for target in ("weights.bin", "missing/page.html", "."):
        with pytest.raises(UsageError):
            pages.write(tmp_path / target, PAGE)
    assert main(["inspect", str(weights), "--html", str(weights)]) == 2
    assert "found something else" in capsys.readouterr().err
    assert weights.read_bytes() == b"of a month"


def test_what_cannot_be_written_is_told_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="File name too long"):
        pages.write(tmp_path / ("p" * 300), PAGE)
    assert list(tmp_path.iterdir()) == []
