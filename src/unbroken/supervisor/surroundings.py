"""Where and with what environment a run was started, so that it can be started so again from anywhere."""

from __future__ import annotations

import os
from collections.abc import Mapping

from unbroken.errors import StorageDeniedError
from unbroken.rundir import layout

# What belongs to a login, a terminal, a service manager or an attempt, and not to the run: it would be
# out of date, or a secret of the session, when somebody else starts the run again.
_OF_A_SESSION = frozenset(
    {
        *("COLORTERM", "COLUMNS", "DISPLAY", "INVOCATION_ID", "JOURNAL_STREAM", "LINES", "MAIL"),
        *("MANAGERPID", "MEMORY_PRESSURE_WATCH", "MEMORY_PRESSURE_WRITE", "NOTIFY_SOCKET", "OLDPWD", "SHLVL"),
        *("STY", "SYSTEMD_EXEC_PID", "TERM", "TMUX", "TMUX_PANE", "WATCHDOG_PID", "WATCHDOG_USEC", "WINDOW"),
        *("WINDOWID", "XAUTHORITY", "XDG_RUNTIME_DIR", "XDG_SEAT", "XDG_VTNR", "_"),
        layout.ATTEMPT_VARIABLE,
        layout.RUN_DIR_VARIABLE,
    }
)
_OF_A_SESSION_BY_PREFIX = (
    *("DBUS_", "GPG_", "LISTEN_", "SSH_", "TERM_", "WAYLAND_", "XDG_SESSION_"),
    # Of a job or a container: taken over by a later one, they would tell of an end that is long past.
    *("KUBERNETES_", "RAY_", "SKYPILOT_", "SLURM_", "SUBMITIT_", "TORCHELASTIC_", "_CONDOR_"),
)


def is_of_a_session(name: str) -> bool:
    """Tell whether a variable belongs to the session of whoever starts a run.

    >>> is_of_a_session("SSH_AUTH_SOCK"), is_of_a_session("CUDA_VISIBLE_DEVICES")
    (True, False)
    """
    return name in _OF_A_SESSION or name.startswith(_OF_A_SESSION_BY_PREFIX)


def kept(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that belong to the run."""
    return {name: value for name, value in environment.items() if not is_of_a_session(name)}


def enter(working_directory: str, environment: Mapping[str, str]) -> None:
    """Go to that directory, and take on that environment beside what is of our own session.

    Raises StorageDeniedError if the directory cannot be entered.
    """
    try:
        os.chdir(working_directory)
    except OSError as error:
        raise StorageDeniedError(
            f"{working_directory}: the run was started there, and it cannot be entered: {error.strerror}",
            hint="make the directory available again, or start the run elsewhere with `unbroken run`",
        ) from error
    of_session = {name: value for name, value in os.environ.items() if is_of_a_session(name)}
    # Not assigned: that would leave the environment of the process, which its children inherit, as it was.
    os.environ.clear()
    os.environ.update({**of_session, **environment})
