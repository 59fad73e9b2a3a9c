"""What starts runs again when the machine is booted."""

from __future__ import annotations

import functools
import importlib
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from unbroken.cli.install_boot import install_boot
from unbroken.errors import StorageDeniedError, UnbrokenError
from unbroken.rundir.identity import open_run
from unbroken.supervisor.host import boot
from unbroken.supervisor.registry import register

if TYPE_CHECKING:
    from .conftest import Bench

# The part of cron that a user sees: it keeps a table, and says so if there is none.
_CRONTAB = """#!/bin/sh
table="$CRON_TABLE"
case "$1" in
-l) test -e "$table.broken" && { echo "crontab: cannot open the spool" >&2; exit 1; }
    test -e "$table" && cat "$table" || { echo "no crontab for me" >&2; exit 1; } ;;
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
    text = boot.unit_text(os.environ)
    boot.verify_unit(text)
    # It only warns of this, and ends with 0.
    faulty = text.replace("oneshot", "nonsense")
    monkeypatch.setattr(boot, "unit_text", lambda _: faulty)
    with pytest.raises(UnbrokenError, match="systemd does not like it"):
        boot.install_unit()
    assert not unit.exists(), "nothing is enabled that does not work"


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
    broken = table.with_name("table.broken")
    broken.touch()
    for arguments in (["--cron"], ["--remove", "--cron"]):
        assert "cannot open the spool" in str(call(arguments).exception)
    broken.unlink()
    assert table.read_text() == "0 5 * * * theirs\n" + shown
    assert call(["--remove", "--cron"]).exit_code == 0
    assert table.read_text() == "0 5 * * * theirs\n"


def test_the_line_of_cron_does_what_it_says(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("XDG_STATE_HOME", "PYTHONPATH"):
        monkeypatch.setenv(name, bench.environment[name])
    # A run that it must look at, and can only tell of.
    supervisor = {"host": "elsewhere", "process_id": 1, "start_ticks": 1, "boot_id": "another"}
    state = {
        "state": "running",
        "reason": "",
        "run_id": "1",
        "name": "it",
        "command": ["true"],
        "evidence": [],
    }
    times = dict.fromkeys(("started_seconds", "changed_seconds", "grace_seconds"), 1.0)
    open_run(bench.directory)
    (bench.directory / "supervisor.json").write_text(json.dumps({**state, **times, "supervisor": supervisor}))
    register("it", bench.directory)
    command = boot.cron_line(bench.environment).removeprefix("@reboot ").replace("\\%", "%")
    done = subprocess.run(
        ["sh", "-c", command],
        cwd="/",
        env={"PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "")
    assert f"run {bench.directory} is not revived" in done.stderr


def test_after_a_boot_a_run_is_tried_again_until_its_disk_is_there(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", bench.environment["XDG_STATE_HOME"])
    for name in ("late", "never"):
        register(name, bench.place / name)
    tries = []

    def revive(directory: Path) -> None:
        tries.append(directory.name)
        if len(tries) == 1:
            raise StorageDeniedError("its working directory is not there", hint="")

    def mount_and_sleep(_: float) -> None:
        open_run(bench.place / "late")
        (bench.place / "late" / "supervisor-plan.json").write_text("{}")

    ends = iter([2.0, 1.0, 0.0])
    module = importlib.import_module("unbroken.cli.revive")
    monkeypatch.setattr(module, "_revive", revive)
    monkeypatch.setattr(module.time, "sleep", mount_and_sleep)
    monkeypatch.setattr(module.boot, "seconds_to_settle", lambda: next(ends, 0.0))
    done = CliRunner().invoke(module.revive, ["--boot"])
    assert (done.exit_code, tries) == (0, ["late", "late"]), done.stderr
    assert f"{bench.place / 'never'} is not there" in done.stderr
