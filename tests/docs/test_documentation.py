"""What the documentation shows works: snippets run, commands exist, links lead somewhere."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest

import unbroken.errors
from unbroken.checkpoint.digest import digest
from unbroken.checkpoint.store import CheckpointStore
from unbroken.cli.main import COMMANDS, cli
from unbroken.state.tensors import HostTensor

from ..checkpoint.states import snapshot_at
from ..zygote import run_script

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "examples/README.md")]
PAGES += sorted((ROOT / "docs").rglob("*.md"))
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: Path, language: str) -> list[str]:
    return [text for kind, text in BLOCK.findall(page.read_text()) if kind == language]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if blocks(page, "python") and page.name != "format.md"],
    ids=name_of,
)
def test_every_python_snippet_runs(page: Path, tmp_path: Path) -> None:
    for number, text in enumerate(blocks(page, "python")):
        script = tmp_path / f"train{number}.py"
        script.write_text(f"import os\nos.chdir({str(tmp_path)!r})\n{text}")
        framework = "tensorflow" if "import keras" in text or "import tensorflow" in text else "torch"
        done = run_script(script, output=tmp_path / "output", framework=framework)
        assert done.returncode == 0, done.stderr


def test_the_reader_in_the_format_page_reads_a_checkpoint_with_the_standard_library_alone(
    tmp_path: Path,
) -> None:
    (text,) = blocks(ROOT / "docs/format.md", "python")
    assert len([line for line in text.splitlines() if line.strip()]) <= 35
    (tmp_path / "reader.py").write_text(text)
    CheckpointStore(tmp_path).save(snapshot_at(7))
    directory = tmp_path / "checkpoints/step-00000007"
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(tmp_path / "reader.py"), str(directory)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "model/weight F32 [600, 500] 1200000" in done.stdout.splitlines()
    namespace: dict[str, object] = {"__name__": "reader"}
    exec(compile(text, "reader.py", "exec"), namespace)
    manifest, tensors = namespace["read_checkpoint"](directory)  # type: ignore[operator]
    expected = CheckpointStore(tmp_path).latest().load_tensors()
    assert manifest["step"] == 7
    assert {
        path: HostTensor(dtype, tuple(shape), memoryview(data))
        for path, (dtype, shape, data) in tensors.items()
    } == expected
    assert all(digest(data) == manifest["tensors"][path]["digest"] for path, (_, _, data) in tensors.items())


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "console")], ids=name_of)
def test_every_command_shown_exists_with_its_options(page: Path) -> None:
    for text in blocks(page, "console"):
        for line in text.splitlines():
            if line.startswith("$ unbroken "):
                name, *arguments = shlex.split(line.removeprefix("$ unbroken "), comments=True)
                command = cli.get_command(click.Context(cli), name)
                assert command is not None, line
                command.make_context(name, arguments)


def test_the_reference_names_every_command_option_error_and_exit_code() -> None:
    page = (ROOT / "docs/reference/commands.md").read_text()
    for name in COMMANDS:
        command = cli.get_command(click.Context(cli), name)
        assert command is not None
        for parameter in command.params:
            shown = [option for option in parameter.opts if option.startswith("-")]
            assert not shown or any(option in page for option in shown), f"{name} {shown}"
    rows = dict(re.findall(r"^\| (\d+)[^|]* \| (.*) \|$", page, re.MULTILINE))
    for value in vars(unbroken.errors).values():
        if isinstance(value, type) and issubclass(value, unbroken.errors.UnbrokenError):
            assert f"`{value.kind}`" in rows[str(value.exit_code)], value


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_to_a_file_leads_to_one(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target


def test_every_page_is_reachable_from_the_readme() -> None:
    seen, todo = set(), [ROOT / "README.md"]
    while todo:
        page = todo.pop().resolve()
        if page in seen:
            continue
        seen.add(page)
        targets = [page.parent / target for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text())]
        todo += [target for target in targets if target.suffix == ".md"]
        todo += [found for target in targets if target.is_dir() for found in target.glob("*.md")]
    assert {page.resolve() for page in PAGES if page.parent != ROOT and "examples" not in page.parts} <= seen
