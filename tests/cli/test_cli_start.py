"""The command line starts light, and its errors have one form."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import unbroken.errors
from unbroken.cli.main import COMMANDS, main
from unbroken.cli.output import data_json, duration, metrics, painted
from unbroken.cli.run import name_for

_SOURCES = Path(unbroken.errors.__file__).parents[1]
_HEAVY = ("torch", "numpy", "rich", "asyncio", "importlib.metadata", "tensorflow", "keras")


def cli(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(_SOURCES), "XDG_STATE_HOME": str(cwd / "state")}
    command = [sys.executable, "-m", "unbroken.cli.main", *arguments]
    return subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=60, check=False
    )


def loaded_by(*arguments: str, cwd: Path) -> set[str]:
    """The modules that are there once a call is over."""
    code = (
        "import sys; from unbroken.cli.main import main; main(sys.argv[1:]); "
        "print('loaded:', *sys.modules, file=sys.stderr)"
    )
    environment = {**os.environ, "PYTHONPATH": str(_SOURCES), "XDG_STATE_HOME": str(cwd / "state")}
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    return set(done.stderr.partition("loaded: ")[2].split())


def test_help_names_every_command_and_loads_none(tmp_path: Path) -> None:
    done = cli("--help", cwd=tmp_path)
    assert done.returncode == 0
    for name, (_, _, text) in COMMANDS.items():
        assert f"  {name} " in done.stdout
        assert text in done.stdout
    loaded = loaded_by("--help", cwd=tmp_path)
    assert "click" in loaded
    assert loaded.isdisjoint({module for module, _, _ in COMMANDS.values()})
    assert loaded.isdisjoint({*_HEAVY, "subprocess", "socket", "unbroken.supervisor"})


@pytest.mark.parametrize("command", ["status", "logs", "stop", "run"])
def test_a_command_loads_neither_the_others_nor_anything_heavy(tmp_path: Path, command: str) -> None:
    loaded = loaded_by(command, "--help", cwd=tmp_path)
    assert f"unbroken.cli.{command}" in loaded
    assert loaded.isdisjoint(_HEAVY)
    assert loaded.isdisjoint({"unbroken.checkpoint.store", "msgspec", "blake3"})
    if command != "run":
        assert loaded.isdisjoint({"subprocess", "unbroken.supervisor.supervisor"})


@pytest.mark.parametrize("command", ["run", "status", "logs", "stop"])
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    said = capsys.readouterr()
    assert said.out.startswith(f"Usage: unbroken {command} ")
    assert said.err == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["frobnicate"], "No such command 'frobnicate'."),
        (["run"], "Missing argument 'COMMAND...'."),
        (["run", "--grace", "soon", "true"], "Invalid value for '--grace'"),
        (["run", "--name", "a/b", "true"], "--name 'a/b': expected letters"),
        (["run", "no-such-program"], "no-such-program: no such command"),
        (["logs", "--nonsense"], "No such option '--nonsense'"),
        (["status", "nowhere"], "nowhere: no run of that name"),
        (["stop"], "no run is known on this machine"),
    ],
)
def test_wrong_usage_is_one_line_a_blank_line_and_a_hint_with_code_2(
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    said = capsys.readouterr()
    assert said.out == ""
    first, blank, hint = said.err.splitlines()
    assert first.startswith("error: ")
    assert message in first
    assert blank == ""
    assert hint.startswith("hint: ")


def test_a_reader_that_goes_away_gets_no_traceback(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(_SOURCES)}
    command = [sys.executable, "-m", "unbroken.cli.main", "--help"]
    read_end, write_end = os.pipe()
    os.close(read_end)
    done = subprocess.run(
        command,
        env=environment,
        cwd=tmp_path,
        stdout=write_end,
        stderr=subprocess.PIPE,
        timeout=60,
        check=False,
    )
    os.close(write_end)
    assert (done.returncode, done.stderr) == (1, b"")


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (("python", "train.py"), "train"),
        (("python", "-u", "src/fit model.py", "--config", "a.yaml"), "fit-model"),
        (("python", "-m", "lab.finetune", "--lr", "1"), "finetune"),
        (("torchrun", "--nproc-per-node", "2", "train.py"), "train"),
        (("./start.sh",), "start"),
        (("bash", "-c", "exit 1"), "bash"),
        (("python3.11", "-m"), "python3"),
        (("/opt/...",), "run"),
    ],
)
def test_a_run_is_called_after_its_script(command: tuple[str, ...], name: str) -> None:
    assert name_for(command) == name


def test_colour_is_for_terminals_that_want_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal:
        def __init__(self, is_terminal: bool) -> None:
            self.isatty = lambda: is_terminal

    monkeypatch.delenv("NO_COLOR", raising=False)
    assert painted("held", "red", Terminal(True)) == "\x1b[31mheld\x1b[0m"  # type: ignore[arg-type]
    assert painted("held", "red", Terminal(False)) == "held"  # type: ignore[arg-type]
    monkeypatch.setenv("NO_COLOR", "1")
    assert painted("held", "red", Terminal(True)) == "held"  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-1, "0.0s"),
        (0.25, "0.2s"),
        (9.96, "10.0s"),
        (10, "10s"),
        (75, "1m15s"),
        (7322, "2h02m"),
        (90000, "1d01h"),
    ],
)
def test_durations_have_their_two_largest_units(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_metrics_are_shown_in_six_digits_and_counts_in_all_theirs() -> None:
    shown = metrics({"loss": 0.123456789, "nan": float("nan"), "seen": 123456789})
    assert shown == "loss 0.123457, nan nan, seen 123456789"
    assert metrics({}) == ""


def test_json_is_json_also_where_a_float_is_none_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    data_json({"loss": float("nan"), "best": [float("-inf"), 0.5]})
    assert capsys.readouterr().out == '{"loss": "nan", "best": ["-inf", 0.5]}\n'
