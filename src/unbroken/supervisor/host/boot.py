"""What starts the runs of a user again after a boot: a systemd user unit, or a line for cron."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from unbroken.errors import UnbrokenError
from unbroken.storage.failures import failed

UNIT = "unbroken-revive.service"
_CRON_MARK = "# unbroken: revive runs at boot"
# Where runs are registered, and what an interpreter needs to find us.
_KEPT = ("LD_LIBRARY_PATH", "PYTHONHOME", "PYTHONPATH", "XDG_STATE_HOME")
_CRON_SECONDS = 10.0
# What a user has is mounted by then, if at all.
_SETTLED_SECONDS = 600.0
# What an empty table is called by most of them, and by busybox.
_NO_TABLE = ("no crontab for", "No such file or directory")


def revive_command() -> list[str]:
    """Return the command that revives all runs of this user."""
    return [sys.executable, "-P", "-m", "unbroken.cli.main", "revive", "--boot"]


def seconds_to_settle() -> float:
    """Return for how long what is missing on this machine may still come, as it was just booted."""
    try:
        up_seconds = float(Path("/proc/uptime").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 0.0
    return max(0.0, _SETTLED_SECONDS - up_seconds)


def unit_text(environment: Mapping[str, str]) -> str:
    """Return the unit that runs it when the user's manager starts, with what it needs of `environment`."""
    lines = [
        "[Unit]",
        "Description=Revive the runs of unbroken that were going on when the machine went down",
        "",
        "[Service]",
        "Type=oneshot",
        # What it starts is not to end with it.
        "KillMode=process",
        *(f"Environment={_quoted(f'{name}={environment[name]}')}" for name in _KEPT if name in environment),
        f"ExecStart={' '.join(_quoted(word).replace('$', '$$') for word in revive_command())}",
        "",
        "[Install]",
        "WantedBy=default.target",
    ]
    return "\n".join(lines) + "\n"


def cron_line(environment: Mapping[str, str]) -> str:
    """Return the line for the user's crontab that runs it at boot."""
    variables = [shlex.quote(f"{name}={environment[name]}") for name in _KEPT if name in environment]
    command = shlex.join(revive_command())
    words = " ".join(["env", *variables, command]) if variables else command
    # cron takes a percent sign for the end of the line.
    return f"@reboot {words}".replace("%", "\\%") + f" {_CRON_MARK}"


def unit_path() -> Path:
    """Return where the unit of this user is, or would be."""
    base = os.environ.get("XDG_CONFIG_HOME")
    config = Path(base) if base else Path.home() / ".config"
    return config / "systemd" / "user" / UNIT


def install_unit() -> list[str]:
    """Write and enable the unit; return what was done, in words.

    Raises StorageError, and UnbrokenError, before anything is done, if systemd finds fault with it.
    """
    path, text = unit_path(), unit_text(os.environ)
    verify_unit(text)
    said = []
    try:
        if not path.exists() or path.read_text() != text:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            said.append(f"wrote {path}")
        wanted = _wanted_link(path)
        # What `systemctl --user enable` does, which needs a manager that runs.
        if not wanted.is_symlink():
            wanted.parent.mkdir(exist_ok=True)
            wanted.symlink_to(Path("..") / path.name)
            said.append(f"enabled it by {wanted}")
    except OSError as error:
        raise failed("write", path, error) from error
    return said


def remove_unit() -> list[str]:
    """Disable and remove the unit; return what was done, in words. Raises StorageError."""
    said = []
    path = unit_path()
    try:
        for old in (_wanted_link(path), path):
            if old.is_symlink() or old.exists():
                old.unlink()
                said.append(f"removed {old}")
    except OSError as error:
        raise failed("remove", path, error) from error
    return said


def verify_unit(text: str) -> None:
    """Raise UnbrokenError if systemd-analyze is there and finds fault with the unit `text`."""
    if shutil.which("systemd-analyze") is None:
        return
    with tempfile.TemporaryDirectory() as place:
        path = Path(place, UNIT)
        path.write_text(text)
        done = subprocess.run(
            ["systemd-analyze", "--user", "verify", str(path)], capture_output=True, text=True, check=False
        )
    # It also complains of units of others that it meets; and what it only warns of ends with 0.
    ours = [line for line in done.stderr.splitlines() if UNIT in line]
    if ours:
        raise UnbrokenError(
            f"{UNIT}: systemd does not like it: {ours[0]}",
            hint="`unbroken install-boot --cron` needs no systemd",
        )


def install_cron() -> list[str]:
    """Put the line into the user's crontab; return what was done, in words."""
    lines, line = _crontab(), cron_line(os.environ)
    if line in lines:
        return []
    _write_crontab([*(other for other in lines if not other.endswith(_CRON_MARK)), line])
    return [f"added to your crontab: {line}"]


def remove_cron() -> list[str]:
    """Take the line out of the user's crontab; return what was done, in words."""
    if not has_cron():
        return []
    lines = _crontab()
    others = [other for other in lines if not other.endswith(_CRON_MARK)]
    if others == lines:
        return []
    _write_crontab(others)
    return ["removed our line from your crontab"]


def has_cron() -> bool:
    """Tell whether there is a crontab to put a line into."""
    return shutil.which("crontab") is not None


def reload_manager() -> None:
    """Let a service manager that runs see what changed."""
    with suppress(OSError, subprocess.TimeoutExpired):
        subprocess.run(
            ["systemctl", "--user", "daemon-reload"],
            capture_output=True,
            check=False,
            timeout=_CRON_SECONDS,
        )


def _wanted_link(path: Path) -> Path:
    return path.parent / "default.target.wants" / path.name


def _quoted(word: str) -> str:
    # Percent signs mean something to systemd, also between quotes.
    for special, escaped in (("\\", "\\\\"), ('"', '\\"'), ("%", "%%")):
        word = word.replace(special, escaped)
    return f'"{word}"'


def _crontab() -> list[str]:
    done = _run_crontab("-l", given=None)
    if done.returncode == 0:
        return done.stdout.splitlines()
    # Any other failure taken for an empty table would have us write over what is there.
    if any(text in done.stderr for text in _NO_TABLE):
        return []
    raise UnbrokenError(
        f"crontab did not show its table: {done.stderr.strip()}",
        hint="add the line by hand: `unbroken install-boot --cron --print` shows it",
    )


def _write_crontab(lines: list[str]) -> None:
    done = _run_crontab("-", given="".join(f"{line}\n" for line in lines))
    if done.returncode != 0:
        raise UnbrokenError(
            f"crontab took no new table: {done.stderr.strip()}",
            hint="add the line by hand: `unbroken install-boot --cron --print` shows it",
        )


def _run_crontab(argument: str, *, given: str | None) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            ["crontab", argument],
            input=given if given is not None else "",
            capture_output=True,
            text=True,
            check=False,
            timeout=_CRON_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UnbrokenError(
            f"crontab could not be asked: {error}", hint="`unbroken install-boot --systemd` needs no cron"
        ) from error
