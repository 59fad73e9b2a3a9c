"""`unbroken install-boot`: let runs go on by themselves after the machine was booted."""

from __future__ import annotations

import os
from pathlib import Path

import click

from unbroken.cli import output
from unbroken.errors import UnbrokenError
from unbroken.supervisor.host import boot, systemd


@click.command("install-boot")
@click.option("--systemd", "by", flag_value="systemd", help="By a unit of your systemd user manager.")
@click.option("--cron", "by", flag_value="cron", help="By a line in your crontab.")
@click.option("--print", "only_print", is_flag=True, help="Show it, and change nothing.")
@click.option("--remove", is_flag=True, help="Take back what an earlier call did.")
def install_boot(by: str | None, only_print: bool, remove: bool) -> None:
    """Let `unbroken revive --boot` run when this machine is booted.

    Runs that were going on when it went down then go on, from their newest checkpoints. Without --systemd or
    --cron it takes what is there, systemd first. Doing it twice changes nothing.
    """
    if remove:
        said = [
            *(boot.remove_unit() if by != "cron" else []),
            *(boot.remove_cron() if by != "systemd" else []),
        ]
        _say(said, "there was nothing to remove")
        return
    by = by or _what_is_there()
    if only_print:
        output.data(
            (boot.unit_text(os.environ) if by == "systemd" else boot.cron_line(os.environ)).rstrip("\n")
        )
        return
    if by == "cron":
        _say(boot.install_cron(), "it is in your crontab already")
        return
    said = boot.install_unit()
    if said and systemd.answers():
        boot.reload_manager()
    _say(said, f"{boot.unit_path()} is there and enabled already")
    if not systemd.is_lingering():
        output.note(
            "unbroken: it runs at boot only if lingering is on for you, else at your next login; "
            f"`loginctl enable-linger {systemd.user()}` turns it on"
        )


def _what_is_there() -> str:
    if systemd.answers() or Path("/run/systemd/system").is_dir():
        return "systemd"
    if boot.has_cron():
        return "cron"
    raise UnbrokenError(
        "neither a systemd user manager nor cron was found",
        hint="let what starts your machine run `unbroken revive --boot` as your user",
    )


def _say(said: list[str], nothing: str) -> None:
    for text in said or [nothing]:
        output.note(f"unbroken: {text}")
