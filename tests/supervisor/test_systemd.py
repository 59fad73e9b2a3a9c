"""Runs in units of a real systemd user manager, which is started here in namespaces of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from unbroken.supervisor.host import systemd

if TYPE_CHECKING:
    from .conftest import Bench

# Mounts and processes of its own; a place in the two trees of control groups that managers know by name, if
# they are there; then the user's manager, and beside it what was given.
_MANAGER = """
set -e
place=$1; group=$2; lingers=$3; shift 3
mount --make-rprivate /
mount -t proc proc /proc
mount -t tmpfs tmpfs /run
mkdir -p /run/systemd/system "$XDG_RUNTIME_DIR" /var/lib/systemd
mount -t tmpfs tmpfs /var/lib/systemd
mkdir /var/lib/systemd/linger
test "$lingers" = no || touch "/var/lib/systemd/linger/$(id -un)"
for tree in /sys/fs/cgroup/systemd /sys/fs/cgroup/unified; do
    if [ -e $tree/cgroup.procs ]; then mkdir $tree/$group; echo $$ > $tree/$group/cgroup.procs; fi
done
systemd --user > "$place/manager.log" 2>&1 &
manager=$!
for i in $(seq 200); do
    state=$(systemctl --user is-system-running 2> /dev/null || true)
    case $state in running|degraded) break ;; esac
    sleep 0.05
done
case $state in running|degraded) ;; *) exit 77 ;; esac
set +e
"$@"
code=$?
systemctl --user exit
wait $manager
exit $code
"""
_NO_MANAGER = 77
_NAMESPACES = ["unshare", "--mount", "--pid", "--fork", "--kill-child"]


def _why_not() -> str:
    needed = ("systemd", "systemd-run", "systemctl", "unshare", "systemd-analyze")
    missing = [name for name in needed if shutil.which(name) is None]
    if missing:
        return f"needs {', '.join(missing)}"
    if os.getuid() != 0:
        return "needs the rights to make namespaces and control groups"
    try:
        done = subprocess.run([*_NAMESPACES, "true"], capture_output=True, check=False)
    except OSError as error:
        return f"needs namespaces: {error}"
    return "" if done.returncode == 0 else "namespaces are not permitted here"


_REASON = _why_not()
real_manager = pytest.mark.skipif(bool(_REASON), reason=_REASON or "it is there")


def under_a_manager(bench: Bench, script: str, *, lingers: bool = True) -> str:
    """Run the shell script `script` beside a user manager, and return what it printed."""
    name = f"unbroken-test-{os.getpid()}"
    home = bench.place / "home"
    home.mkdir(exist_ok=True)
    environment = {
        **bench.environment,
        "HOME": str(home),
        "XDG_CONFIG_HOME": str(home / ".config"),
        "XDG_RUNTIME_DIR": "/run/user/0",
        "UNBROKEN": " ".join(bench.command()),
    }
    arguments = [str(bench.place), name, "yes" if lingers else "no", "bash", "-euc", script]
    try:
        done = subprocess.run(
            [*_NAMESPACES, "bash", "-c", _MANAGER, "manager", *arguments],
            cwd=bench.place,
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    finally:
        for tree in ("systemd", "unified"):
            for group in sorted(Path("/sys/fs/cgroup", tree, name).glob("**/"), reverse=True):
                group.rmdir()
    log = bench.place / "manager.log"
    said = done.stderr + done.stdout + (log.read_text() if log.exists() else "")
    if done.returncode == _NO_MANAGER or not log.exists():
        pytest.skip(f"no user manager can be started here: {said}")
    assert done.returncode == 0, said
    return done.stdout


_STATE = """
state() { python3 -c "import json; v = json.load(open('runs/it/supervisor.json')); print(v$1)"; }
until_true() {
    for i in $(seq 400); do if eval "$1"; then return; fi; sleep 0.05; done
    echo "never: $1" >&2; exit 9
}
"""


@pytest.mark.chaos
@real_manager
def test_in_a_unit_a_killed_supervisor_is_started_again_and_adopts_its_attempt(
    bench: Bench, training: str
) -> None:
    said = under_a_manager(
        bench,
        f"""{_STATE}
        $UNBROKEN run --name it --detach --grace 7 -- python3 {training} 2>&1
        until_true 'grep -q training runs/it/attempts/0001/out.log'
        unit=$(systemctl --user list-units --plain --no-legend 'unbroken-it-*' | cut -d' ' -f1)
        for name in KillMode OOMPolicy Delegate TimeoutStopUSec Restart; do
            systemctl --user show -p $name $unit
        done
        leader=$(state "['leader']['process_id']")
        first=$(state "['supervisor']['process_id']")
        kill -9 $first
        until_true 'test $(state "[\\"supervisor\\"][\\"process_id\\"]") != '$first
        until_true 'test $(state "[\\"state\\"]") = running'
        echo adopted $leader as $(state "['leader']['process_id']"), attempts: $(ls runs/it/attempts)
        # The manager ends the unit: the supervisor lets the attempt save.
        systemctl --user stop $unit
        echo $(state "['state']") $(state "['exit_code']")
        tail -n 1 runs/it/attempts/0001/out.log
        """,
    )
    lines = said.splitlines()
    for line in ("KillMode=process", "OOMPolicy=continue", "Delegate=yes", "Restart=on-abnormal"):
        assert line in lines
    assert "TimeoutStopUSec=1min 37s" in lines
    assert any(line.startswith("unbroken: unit unbroken-it-") for line in lines)
    adopted = next(line for line in lines if line.startswith("adopted")).split()
    assert adopted[1] == adopted[3].rstrip(",")
    assert adopted[4:] == ["attempts:", "0001"]
    assert lines[-2:] == ["stopped 75", "saved"]
    assert bench.attempts() == 1


@pytest.mark.chaos
@real_manager
def test_an_error_that_prevents_the_start_is_told_through_the_unit(bench: Bench) -> None:
    bench.directory.mkdir(parents=True)
    (bench.directory / "run.json").write_text('{"format": "something else"}')
    said = under_a_manager(bench, "$UNBROKEN run --name it --detach -- true 2>&1 || echo code $?")
    assert "something else" in said
    assert said.splitlines()[-1] == "code 78"


@pytest.mark.chaos
@real_manager
def test_without_lingering_the_run_is_started_beside_it_and_the_command_is_told(bench: Bench) -> None:
    said = under_a_manager(
        bench,
        "$UNBROKEN run --name it --detach -- true 2>&1; systemctl --user list-units 'unbroken-*'",
        lingers=False,
    )
    assert "`loginctl enable-linger root` turns it on" in said
    assert "unbroken-it" not in said
    bench.until(lambda: bench.state().get("state") == "done")


@pytest.mark.chaos
@real_manager
def test_the_boot_unit_revives_what_was_going_on_in_units_that_outlive_it(
    bench: Bench, training: str
) -> None:
    # Quoted in all the ways that mean something to systemd.
    bench.environment["XDG_STATE_HOME"] = str(bench.place / 'state 100% $HOME "q" \\')
    assert bench.python(training, "--detach").returncode == 0
    bench.until(lambda: "training" in bench.output())
    state = bench.state()
    for who in ("supervisor", "leader"):
        os.kill(state[who]["process_id"], 9)
    bench.until(lambda: not Path(f"/proc/{state['leader']['process_id']}").exists())
    for name in ("supervisor.json", "supervisor-holder.json"):
        path = bench.directory / name
        path.write_text(path.read_text().replace(state["supervisor"]["boot_id"], "another-boot"))
    said = under_a_manager(
        bench,
        f"""{_STATE}
        $UNBROKEN install-boot 2>&1
        systemctl --user start unbroken-revive.service
        until_true 'grep -q training runs/it/attempts/0002/out.log'
        systemctl --user list-units --plain --no-legend 'unbroken-it-*'
        $UNBROKEN stop it 2>&1
        """,
    )
    assert "wrote " in said
    assert "unbroken-it-" in said
    assert bench.read("attempts/0001/verdict.json")["cause"] == "reboot"
    journal = (bench.directory / "journal.jsonl").read_text().splitlines()
    assert [json.loads(line)["kind"] for line in journal].count("run-revived") == 1
    assert bench.state()["state"] == "stopped"


def test_no_manager_is_asked_where_there_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert not systemd.answers()
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert not systemd.answers()
