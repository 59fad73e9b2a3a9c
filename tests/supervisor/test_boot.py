"""What starts runs again when the machine is booted."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from unbroken.cli.install_boot import install_boot
from unbroken.supervisor import boot

if TYPE_CHECKING:
    from .conftest import Bench

# The part of cron that a user sees: it keeps a table, and says so if there is none.
_CRONTAB = """#!/bin/sh
table="$CRON_TABLE"
case "$1" in
-l) test -e "$table" && cat "$table" || { echo "no crontab for me" >&2; exit 1; } ;;
-) cat > "$table" ;;
esac
"""


@pytest.fixture
def unit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "config" / "systemd" / "user" / boot.UNIT


def test_the_unit_is_installed_once_enabled_and_taken_back_again(unit: Path) -> None:
    wanted = unit.parent / "default.target.wants" / unit.name
    first = CliRunner().invoke(install_boot, ["--systemd"])
    assert (first.exit_code, first.stdout) == (0, "")
    assert f"wrote {unit}" in first.stderr
    assert wanted.resolve() == unit.resolve()
    assert f"XDG_STATE_HOME={os.environ['XDG_STATE_HOME']}" in unit.read_text()
    before = unit.stat().st_mtime_ns
    assert "already" in CliRunner().invoke(install_boot, ["--systemd"]).stderr
    assert unit.stat().st_mtime_ns == before
    shown = CliRunner().invoke(install_boot, ["--systemd", "--print"])
    assert shown.stdout == unit.read_text()
    assert CliRunner().invoke(install_boot, ["--remove"]).exit_code == 0
    assert not unit.exists()
    assert not wanted.is_symlink()
    assert "nothing to remove" in CliRunner().invoke(install_boot, ["--remove"]).stderr


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_finds_no_fault_with_the_unit(unit: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # What means something to systemd must come through as it is.
    monkeypatch.setenv("PYTHONPATH", '/a place/100%/$HOME/"quoted"')
    boot.install_unit()
    boot.verify_unit()
    verify = ["systemd-analyze", "--user", "verify", str(unit)]
    done = subprocess.run(verify, capture_output=True, text=True, check=False)
    assert boot.UNIT not in done.stderr
    unit.write_text(unit.read_text().replace("oneshot", "nonsense"))
    done = subprocess.run(verify, capture_output=True, text=True, check=False)
    assert boot.UNIT in done.stderr, "it does look at it"


def test_the_line_of_cron_is_put_in_once_beside_what_is_there_and_taken_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "crontab").write_text(_CRONTAB)
    (tmp_path / "crontab").chmod(0o755)
    table = tmp_path / "table"
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("CRON_TABLE", str(table))
    call = functools.partial(CliRunner().invoke, install_boot)
    shown = call(["--cron", "--print"]).stdout
    assert not table.exists()
    assert call(["--cron"]).exit_code == 0
    assert table.read_text() == shown
    table.write_text("0 5 * * * theirs\n" + shown.replace("revive --boot", "revive --old"))
    assert call(["--cron"]).exit_code == 0
    assert "already" in call(["--cron"]).stderr
    assert table.read_text() == "0 5 * * * theirs\n" + shown
    assert call(["--remove", "--cron"]).exit_code == 0
    assert table.read_text() == "0 5 * * * theirs\n"


def test_the_line_of_cron_does_what_it_says(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("XDG_STATE_HOME", "PYTHONPATH"):
        monkeypatch.setenv(name, bench.environment[name])
    command = boot.cron_line(bench.environment).removeprefix("@reboot ").replace("\\%", "%")
    done = subprocess.run(
        ["sh", "-c", command],
        cwd="/",
        env={"PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
