"""The folders of trainers as one checkpoint. They are laid out after the sources of their libraries."""

from __future__ import annotations

import json
import random
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from unbroken.cli.main import main
from unbroken.errors import DamagedError, UsageError
from unbroken.inspection import roles
from unbroken.inspection.conversion import convert
from unbroken.inspection.detect import is_foreign, open_checkpoint
from unbroken.inspection.formats.base import CheckpointReader

from .golden import GOLDEN, bytes_of


class TrainingArguments:
    """A class that nobody imports again."""

    def __init__(self) -> None:
        self.fp16 = True
        self.learning_rate = 5e-5


@cache
def parts() -> dict[str, Any]:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3).state_dict(),
        "rng": {
            "python": random.getstate(),
            "numpy": np.random.get_state(),
            "cpu": torch.get_rng_state(),
        },
    }


def of_trainer(directory: Path, step: int, *, ranks: int = 1, **state: Any) -> Path:
    folder = directory / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    save_file(parts()["model"], folder / "model.safetensors")
    torch.save(parts()["optimizer"], folder / "optimizer.pt")
    torch.save(parts()["scheduler"], folder / "scheduler.pt")
    for rank in range(ranks):
        name = f"rng_state_{rank}.pth" if ranks > 1 else "rng_state.pth"
        torch.save(parts()["rng"], folder / name)
    torch.save(TrainingArguments(), folder / "training_args.bin")
    said = {"epoch": 1.5, "global_step": step, "log_history": [{"loss": 0.5}], **state}
    (folder / "trainer_state.json").write_text(json.dumps(said))
    (folder / "tokenizer.json").write_text("{}")
    return folder


def of_accelerate(folder: Path, *, ranks: int = 1) -> Path:
    folder.mkdir()
    save_file(parts()["model"], folder / "model.safetensors")
    torch.save(parts()["optimizer"], folder / "optimizer.bin")
    torch.save(parts()["scheduler"], folder / "scheduler.bin")
    torch.save({"epoch": 1}, folder / "sampler.bin")
    torch.save({"mine": torch.ones(2)}, folder / "custom_checkpoint_0.pkl")
    for rank in range(ranks):
        generators = {
            "step": 0,
            "random_state": random.getstate(),
            "torch_manual_seed": torch.get_rng_state(),
        }
        torch.save(generators, folder / f"random_states_{rank}.pkl")
    return folder


def told(reader: CheckpointReader) -> list[str]:
    return [found.problem for found in (*reader.problems, *reader.verify())]


def advice_on(target: Path, capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, str]:
    main(["doctor", str(target), "--json", *options])
    return {one["text"]: one["severity"] for one in json.loads(capsys.readouterr().out)["advice"]}


def test_a_folder_of_the_trainer_is_one_checkpoint_with_parts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = of_trainer(tmp_path, 20)
    reader = open_checkpoint(folder)
    assert (reader.format, told(reader)) == ("Hugging Face Trainer", [])
    assert bytes(reader.read("model/weight")) == bytes_of(parts()["model"]["weight"])
    assert bytes(reader.read("optimizer/state/0/exp_avg")) == bytes_of(
        parts()["optimizer"]["state"][0]["exp_avg"]
    )
    assert reader.values["training_args"]["state"]["learning_rate"] == 5e-5
    assert roles.counters(reader.values) == {"trainer_state/epoch": 1.5, "trainer_state/global_step": 20}
    assert roles.optimizers(reader.values)[0]["learning_rates"] == [0.5]
    assert reader.checksums == "CRC-32 of each entry; none in model.safetensors"
    assert main(["inspect", str(folder), "--tensors"]) == 0
    assert "trainer_state.global_step" in capsys.readouterr().out
    convert(reader, tmp_path / "merged.safetensors")
    assert bytes(open_checkpoint(tmp_path / "merged.safetensors").read("model/weight")) == bytes_of(
        parts()["model"]["weight"]
    )


def test_a_folder_of_accelerate_is_one_checkpoint_with_parts(tmp_path: Path) -> None:
    reader = open_checkpoint(of_accelerate(tmp_path / "step_5", ranks=2))
    assert (reader.format, told(reader)) == ("Accelerate", [])
    assert {path.partition("/")[0] for path in reader.tensors} == {
        "model",
        "optimizer",
        "custom_checkpoint_0",
        "random_states_0",
        "random_states_1",
    }
    assert reader.values["sampler"] == {"epoch": 1}
    assert reader.facts["generators_of_ranks"] == 2


def test_a_model_and_an_optimizer_that_are_cut_by_ranks_are_parts_too(tmp_path: Path) -> None:
    folder = of_accelerate(tmp_path / "fsdp", ranks=2)
    (folder / "model.safetensors").unlink()
    (folder / "optimizer.bin").unlink()
    shutil.copytree(GOLDEN / "dcp/fsdp", folder / "pytorch_model_fsdp_0")
    reader = open_checkpoint(folder)
    assert told(reader) == []
    assert reader.tensors["model/model/0.weight"].shape == (5, 3)
    (folder / "pytorch_model_fsdp_0/.metadata").unlink()
    assert "the save was never finished" in told(open_checkpoint(folder))[0]


def test_a_model_in_several_files_is_read_by_its_index(tmp_path: Path) -> None:
    folder = of_trainer(tmp_path, 20)
    (folder / "model.safetensors").unlink()
    for file in (GOLDEN / "sharded").iterdir():
        shutil.copy(file, folder)
    assert sum(path.startswith("model/") for path in open_checkpoint(folder).tensors) == 9
    (folder / "model.safetensors.index.json").unlink()
    assert told(open_checkpoint(folder)) == [
        "the index of 2 of 2 files of the model is missing: it is written after them"
    ]
    names = {}
    for index, (name, value) in enumerate(parts()["model"].items(), 1):
        names[name] = f"pytorch_model-0000{index}-of-00002.bin"
        torch.save({name: value}, folder / names[name])
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": names}))
    reader = open_checkpoint(folder)
    assert {"model/weight", "model/bias"} <= reader.tensors.keys()
    (folder / names["weight"]).unlink()
    assert "expected a file beside the index, found none" in told(open_checkpoint(folder))[0]


@pytest.mark.parametrize(
    ("gone", "words"),
    [
        ("trainer_state.json", "it is written last, so the save was not finished"),
        ("optimizer.pt", "optimizer.pt is missing, though other files"),
        ("scheduler.pt", "scheduler.pt is missing"),
        ("model.safetensors", "there is no file of the model"),
        ("rng_state_0.pth", "the random generators of rank 0 of 2 are missing"),
    ],
)
def test_what_belongs_to_a_save_and_is_missing_is_a_problem(tmp_path: Path, gone: str, words: str) -> None:
    folder = of_trainer(tmp_path, 20, ranks=2)
    (folder / gone).unlink()
    (problem,) = told(open_checkpoint(folder))
    assert words in problem


def test_a_save_that_was_killed_after_the_model_is_incomplete(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-30"
    folder.mkdir()
    save_file(parts()["model"], folder / "model.safetensors")
    assert "trainer_state.json is missing" in told(open_checkpoint(folder))[0]
    folder = of_accelerate(tmp_path / "checkpoint_3")
    (folder / "random_states_0.pkl").unlink()
    assert "random_states_0.pkl is missing" in told(open_checkpoint(folder))[0]


def test_a_model_that_is_for_use_is_no_training_folder(tmp_path: Path) -> None:
    save_file(parts()["model"], tmp_path / "model.safetensors")
    torch.save(TrainingArguments(), tmp_path / "training_args.bin")
    assert open_checkpoint(tmp_path).format == "safetensors"


def test_the_number_of_a_folder_and_its_step_have_to_agree(tmp_path: Path) -> None:
    of_trainer(tmp_path, 20).rename(tmp_path / "checkpoint-30")
    assert told(open_checkpoint(tmp_path / "checkpoint-30")) == [
        "global_step 20, though the folder is called checkpoint-30"
    ]


def test_damage_is_named_with_the_file_that_it_is_in(tmp_path: Path) -> None:
    folder = of_trainer(tmp_path, 20)
    data = bytearray((folder / "optimizer.pt").read_bytes())
    data[data.index(bytes_of(parts()["optimizer"]["state"][0]["exp_avg"])) + 1] ^= 1
    (folder / "optimizer.pt").write_bytes(data)
    (found,) = open_checkpoint(folder).verify()
    assert found.file == "optimizer.pt"
    assert "tensor state/0/exp_avg" in found.problem
    (folder / "optimizer.pt").write_bytes(data[:-30])
    (folder / "trainer_state.json").write_text("[" * 100_000)
    assert {found.file for found in open_checkpoint(folder).problems} == {
        "optimizer.pt",
        "trainer_state.json",
    }


def test_no_file_outside_of_the_folder_is_opened(tmp_path: Path) -> None:
    folder = of_trainer(tmp_path / "runs", 20)
    for name in ("optimizer.pt", "trainer_state.json"):
        shutil.move(folder / name, tmp_path / name)
        (folder / name).symlink_to(tmp_path / name)
    assert sorted(found.file for found in open_checkpoint(folder).problems) == [
        "optimizer.pt",
        "trainer_state.json",
    ]


def test_of_several_folders_the_last_by_its_number_is_meant(tmp_path: Path) -> None:
    for step in (9, 10):
        of_trainer(tmp_path, step)
    assert is_foreign(tmp_path)
    assert open_checkpoint(tmp_path).path.name == "checkpoint-10"


def test_a_pointer_says_which_directory_is_meant(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "dcp/fsdp", tmp_path / "iter_0000007")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7\n")
    assert open_checkpoint(tmp_path).path.name == "iter_0000007"
    for name in ("8", "../x", "", "a\x00b", "\x1b[2J"):
        (tmp_path / "latest_checkpointed_iteration.txt").write_text(name)
        with pytest.raises(DamagedError) as caught:
            open_checkpoint(tmp_path)
        assert "\x1b" not in caught.value.message
    (tmp_path / "latest_checkpointed_iteration.txt").unlink()
    with pytest.raises(UsageError):
        open_checkpoint(tmp_path)


def test_what_lightning_says_of_itself_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    progress = {"total": {"completed": 27}, "current": {"ready": 7, "completed": 7}}
    content = {
        "epoch": 2,
        "global_step": 27,
        "pytorch-lightning_version": "2.5.1",
        "state_dict": parts()["model"],
        "loops": {"fit_loop": {"epoch_loop.batch_progress": progress}},
        "optimizer_states": [parts()["optimizer"]],
        "lr_schedulers": [parts()["scheduler"]],
    }
    torch.save(content, tmp_path / "last.ckpt")
    assert main(["inspect", str(tmp_path / "last.ckpt"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["format"] == "Lightning, torch.save"
    assert found["metadata"] == {"Lightning": "2.5.1", "batches of the epoch": "7"}
    assert found["counters"] == {"epoch": 2, "global_step": 27}
    assert [one["where"] for one in found["optimizers"]] == ["optimizer_states/0"]
    assert [one["where"] for one in found["schedulers"]] == ["lr_schedulers/0"]


class TestDoctor:
    def test_nothing_is_in_the_way_of_a_whole_folder(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        folder = of_trainer(tmp_path, 20)
        torch.save({"scale": 2.0}, folder / "scaler.pt")
        assert advice_on(folder, capsys) == {}

    def test_a_lost_scaler_and_another_number_of_processes_are_pointed_out(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        folder = of_trainer(tmp_path, 20, ranks=2, best_model_checkpoint="runs/checkpoint-10")
        assert advice_on(folder, capsys, "--world-size", "4") == {
            "random generators are kept for 2 processes, and 4 are to go on": "warning",
            "it holds no scaler of the loss, though it was trained in float16": "warning",
            "its best checkpoint, checkpoint-10, is not there any more": "note",
        }

    def test_a_half_written_folder_of_a_higher_number_is_what_a_trainer_takes(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        for step in (10, 20, 30):
            of_trainer(tmp_path, step)
        (tmp_path / "checkpoint-30/trainer_state.json").unlink()
        words = "checkpoint-30 is not whole, and a trainer that takes the last one takes that"
        assert advice_on(tmp_path / "checkpoint-20", capsys)[words] == "warning"
        assert "checkpoint-20 is the newest before it that is whole" in advice_on(tmp_path, capsys)
        assert "checkpoint-20 is newer, and whole" not in advice_on(tmp_path / "checkpoint-10", capsys)

    def test_a_pointer_that_lies_or_names_another_is_pointed_out(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        for name in ("global_step1", "global_step2"):
            shutil.copytree(GOLDEN / "dcp/fsdp", tmp_path / name)
        (tmp_path / "latest").write_text("global_step2")
        words = "latest beside it names global_step2, and so that is what is loaded"
        assert advice_on(tmp_path / "global_step1", capsys)[words] == "note"
        (tmp_path / "latest").write_text("global_step3")
        words = "latest beside it lies: nothing can be loaded by it"
        assert advice_on(tmp_path / "global_step1", capsys)[words] == "warning"
