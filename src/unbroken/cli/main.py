"""The entry point: finds the command, and turns errors into words and exit codes."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

import click

from unbroken.cli import output
from unbroken.errors import EXIT_ERROR, EXIT_OK, UnbrokenError

_EXIT_INTERRUPTED = 130

# name -> (module, attribute, one line of help): help and start of one command load no other.
COMMANDS: dict[str, tuple[str, str, str]] = {
    "run": ("unbroken.cli.run", "run", "Start a command and keep it going."),
    "status": ("unbroken.cli.status", "status", "Show what runs are doing."),
    "top": ("unbroken.cli.top", "top", "Watch what runs are doing."),
    "why": ("unbroken.cli.why", "why", "Say why a run ended or was restarted."),
    "logs": ("unbroken.cli.logs", "logs", "Show the output of a run."),
    "save": ("unbroken.cli.save", "save", "Ask a run for a checkpoint now."),
    "attach": ("unbroken.cli.attach", "attach", "Show a run that is going on, to its end."),
    "stop": ("unbroken.cli.stop", "stop", "Ask a run to save and stop."),
    "release": ("unbroken.cli.release", "release", "Start a run again that was held."),
    "revive": ("unbroken.cli.revive", "revive", "Take over a run whose supervisor is gone."),
    "install-boot": ("unbroken.cli.install_boot", "install_boot", "Let runs go on after a reboot."),
    "ls": ("unbroken.cli.ls", "ls", "List the checkpoints of a run."),
    "inspect": ("unbroken.cli.inspect", "inspect", "Show what is in a checkpoint."),
    "verify": ("unbroken.cli.verify", "verify", "Check every byte of a run's checkpoints."),
    "report": ("unbroken.cli.report", "report", "Write a page about a run: curves, verdicts, time."),
    "diff": ("unbroken.cli.diff", "diff", "Show what differs between two checkpoints."),
    "doctor": ("unbroken.cli.doctor", "doctor", "Say what is in the way of a resume."),
    "convert": ("unbroken.cli.convert", "convert", "Write any checkpoint in another format."),
    "export": ("unbroken.cli.export", "export", "Write the weights of a checkpoint, for use."),
    "prune": ("unbroken.cli.prune", "prune", "Delete checkpoints that no policy wants."),
    "pin": ("unbroken.cli.pin", "pin", "Keep a checkpoint from every prune."),
    "drill": ("unbroken.cli.drill", "drill_command", "Prove that a script resumes bit for bit."),
    "simulate": ("unbroken.cli.simulate", "simulate", "Rehearse a failure with a toy job."),
}


class _LazyGroup(click.Group):
    """Loads a command when it is called; its help comes from the table."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, attribute, _ = COMMANDS[cmd_name]
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command), f"{module}.{attribute} is no command"
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, _, text) in COMMANDS.items()])


def _print_version(context: click.Context, _: click.Parameter, wanted: bool) -> None:
    if not wanted:
        return
    # Slow to load, and seldom asked for.
    from importlib.metadata import version

    output.data(f"unbroken {version('unbroken')}")
    context.exit()


@click.group(
    cls=_LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_version,
    help="Show the version and exit.",
)
def cli() -> None:
    """Training runs that survive anything, resume bit for bit, and prove it.

    \b
    unbroken run -- python train.py    start it, close the laptop
    unbroken status                    look at it from anywhere

    Exit codes: 0 ok, 1 error, 2 usage, 3 damaged, 4 nothing to resume, 75 state saved: run it again,
    78 held: a human is needed, 128 + n ended by signal n.
    """


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    try:
        code = _run(arguments)
        # Here, not at exit, where a reader that went away would be a traceback.
        sys.stdout.flush()
    except BrokenPipeError:
        # What is still in the buffer has nowhere to go. The code is the one click ends with when the
        # reader goes away inside a command.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_ERROR
    return code


def _run(arguments: Sequence[str] | None) -> int:
    try:
        code = cli.main(
            args=list(arguments) if arguments is not None else None,
            prog_name="unbroken",
            standalone_mode=False,
        )
    except UnbrokenError as error:
        output.error(error.message, hint=error.hint)
        return error.exit_code
    except click.ClickException as error:
        output.error(error.format_message(), hint=_help_for(error))
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        return _EXIT_INTERRUPTED
    return code if isinstance(code, int) else EXIT_OK


def _help_for(error: click.ClickException) -> str:
    context = error.ctx if isinstance(error, click.UsageError) else None
    path = context.command_path if context is not None else "unbroken"
    return f"`{path} --help` shows what it takes"


if __name__ == "__main__":
    sys.exit(main())
