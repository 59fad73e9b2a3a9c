"""The user's own service manager: a supervisor in a unit of its own outlives logins, and is started again.

Only where the manager goes on without a login ("lingering"): otherwise it ends with the last session, and
everything in its units with it.
"""

from __future__ import annotations

import math
import os
import pwd
import re
import shutil
import subprocess
import zlib
from pathlib import Path

from unbroken.supervisor.cgroups import SUPERVISOR_GROUP

_ANSWER_SECONDS = 5.0
# What the supervisor takes beyond the grace to kill a tree and to prove it empty.
_BEYOND_GRACE_SECONDS = 90.0
_WITH_SUBGROUPS = 254
# What an interpreter needs to be itself; the rest of the environment is in the plan.
_OF_THE_INTERPRETER = ("LD_LIBRARY_PATH", "PYTHONHOME", "PYTHONPATH")


def answers() -> bool:
    """Tell whether a service manager of this user runs and answers."""
    place = os.environ.get("XDG_RUNTIME_DIR")
    if not place or not Path(place, "systemd").is_dir() or shutil.which("systemd-run") is None:
        return False
    try:
        done = subprocess.run(
            ["systemctl", "--user", "show", "--property=Version", "--value"],
            capture_output=True,
            timeout=_ANSWER_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def is_lingering() -> bool:
    """Tell whether the user's manager lives on without a login, and is started at boot."""
    return Path("/var/lib/systemd/linger", user()).exists()


def user() -> str:
    """Return the name of this user, or the number of one without a name."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def unit_name(directory: Path) -> str:
    """Return the name of the unit that keeps the run in `directory` going.

    >>> unit_name(Path("/home/me/runs/digits 2"))
    'unbroken-digits-2-84a968b6.service'
    """
    name = re.sub(r"[^A-Za-z0-9_.]+", "-", directory.name)
    return f"unbroken-{name}-{zlib.crc32(os.fsencode(directory)):08x}.service"


def in_a_unit(directory: Path, command: list[str], *, grace_seconds: float) -> list[str]:
    """Return the command that runs `command`, with our stdin and stdout, in the unit of that run."""
    properties = [
        # Only the supervisor gets SIGTERM, and only it is killed when it does not obey: it ends its
        # attempt itself. "mixed" would kill the attempt where the supervisor was killed.
        "KillMode=process",
        "Restart=on-abnormal",
        "RestartSec=1",
        # A data worker that ran out of memory is no reason to stop all the rest.
        "OOMPolicy=continue",
        "Delegate=yes",
        f"TimeoutStopSec={math.ceil(grace_seconds + _BEYOND_GRACE_SECONDS)}",
    ]
    if _version() >= _WITH_SUBGROUPS:
        # Attempts get groups beside it, in which memory is counted; the one above may then hold no process.
        properties.append(f"DelegateSubgroup={SUPERVISOR_GROUP}")
    return [
        *("systemd-run", "--user", "--quiet", "--collect", "--pipe", f"--unit={unit_name(directory)}"),
        f"--description=unbroken run {directory}",
        *(f"--property={item}" for item in properties),
        *(f"--setenv={name}={os.environ[name]}" for name in _OF_THE_INTERPRETER if name in os.environ),
        "--",
        *command,
    ]


def is_machine_going_down() -> bool:
    """Tell whether this machine is being shut down, as far as systemd says so."""
    if not Path("/run/systemd/system").is_dir():
        return False
    try:
        done = subprocess.run(
            ["systemctl", "is-system-running"],
            capture_output=True,
            text=True,
            timeout=_ANSWER_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.stdout.strip() == "stopping"


def _version() -> int:
    done = subprocess.run(["systemctl", "--version"], capture_output=True, text=True, check=False)
    found = re.match(r"systemd (\d+)", done.stdout)
    return int(found[1]) if found else 0
