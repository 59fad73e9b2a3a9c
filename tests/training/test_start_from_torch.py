"""Training that plain torch, Lightning or a trainer began goes on in a run, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset

import unbroken

from .rolled_back import events
from .torch_starts import (
    BUILDS,
    INPUTS,
    TARGETS,
    Build,
    Parts,
    adam,
    begin,
    bits,
    grouped,
    lightning,
    model,
    of_kind,
    one_cycle,
    refused,
    said,
    saved,
    sgd,
    states,
    stepped,
    train,
    trained,
    trainer,
)


@pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)
def test_training_of_plain_torch_goes_on_bit_for_bit(build: Build, tmp_path: Path) -> None:
    source = saved(tmp_path / "old.pt", build)
    parts = build()
    with begin(tmp_path, source, parts) as run:
        train(parts, 3, run.step)
    assert bits(states(parts)) == bits(states(trained(build, 7)))


def test_the_run_counts_on_and_its_own_checkpoints_win(tmp_path: Path) -> None:
    source = saved(tmp_path / "old.pt", stepped, epoch=3, global_step=4, best=0.5)
    parts = stepped()
    with begin(tmp_path, source, parts) as run:
        assert (run.step_count, run.restored) == (4, None)
        words = said(run)
        train(parts, 2, run.step)
    for line in (
        "step 4 is its global_step",
        "its epoch is 3",
        "not taken over: epoch, global_step, best",
        "random generators are not taken",
        "position in the data",
        "optimizer: its parameters are taken by their order",
    ):
        assert line in words
    again = stepped()
    with begin(tmp_path, source, again) as run:
        assert (run.step_count, run.started_from) == (6, None)
    assert bits(states(again)) == bits(states(trained(stepped, 6)))


@pytest.mark.parametrize(
    "keys",
    [
        {"model": "model_state_dict", "optimizer": "optimizer_state_dict", "scheduler": "lr_scheduler"},
        {"model": "net", "optimizer": "optim", "scheduler": "sched"},
        {"model": "state_dict", "optimizer": "optimizer", "scheduler": "scheduler_state"},
    ],
)
def test_states_are_found_by_what_is_in_them(keys: dict[str, str], tmp_path: Path) -> None:
    found = states(trained(stepped))
    torch.save({keys[name]: state for name, state in found.items()}, tmp_path / "old.pth")
    parts = stepped()
    with begin(tmp_path, tmp_path / "old.pth", parts) as run:
        assert run.started_from is not None
        assert set(run.started_from.parts) == set(parts)
    assert bits(states(parts)) == bits(found)


def test_files_of_before_torch_wrote_zips_are_read_too(tmp_path: Path) -> None:
    found = states(trained(stepped))
    torch.save(found, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    parts = stepped()
    with begin(tmp_path, tmp_path / "old.pt", parts):
        pass
    assert bits(states(parts)) == bits(found)


class Scaled(torch.optim.SGD):
    """An optimizer of the user's own, whose state_dict has one thing more."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1, momentum=0.9)
        self.calls = 0

    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        return super().step(closure)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "calls": self.calls}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state = dict(state_dict)
        self.calls = state.pop("calls")
        super().load_state_dict(state)


def test_an_optimizer_of_the_users_own_goes_on_and_what_is_not_known_is_said(tmp_path: Path) -> None:
    def own() -> Parts:
        net = model()
        return {"model": net, "optimizer": Scaled(net.parameters())}

    source = saved(tmp_path / "old.pt", own)
    parts = own()
    with begin(tmp_path, source, parts) as run:
        assert "what a Scaled keeps for a parameter is not known before it steps" in said(run)
        assert parts["optimizer"].calls == 4
        train(parts, 3, run.step)
    assert bits(states(parts)) == bits(states(trained(own, 7)))


def test_counters_of_the_script_are_taken_by_their_name(tmp_path: Path) -> None:
    source = saved(tmp_path / "old.pt", sgd, progress={"best": 0.5, "seen": 24}, kept=torch.ones(2))
    parts = {**sgd(), "progress": {"best": 0.0, "seen": 0}, "kept": torch.zeros(2)}
    with begin(tmp_path, source, parts):
        assert parts["progress"] == {"best": 0.5, "seen": 24}
        assert parts["kept"].tolist() == [1.0, 1.0]


def test_without_a_counter_the_steps_of_the_optimizer_count(tmp_path: Path) -> None:
    source = saved(tmp_path / "old.pt", adam, count=5, step=2)
    with begin(tmp_path, source, adam()) as run:
        assert run.step_count == 5
        assert "step 5 is how often its optimizer has stepped" in said(run)


def test_training_of_lightning_goes_on_bit_for_bit(tmp_path: Path) -> None:
    source = lightning(tmp_path, one_cycle)
    parts = one_cycle()
    with begin(tmp_path, source, parts) as run:
        assert run.step_count == 4
        assert "model: its names are taken without 'model'" in said(run)
        train(parts, 3, run.step)
    assert bits(states(parts)) == bits(states(trained(one_cycle, 7)))


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod.", "net.encoder."])
def test_what_stands_before_all_names_is_left_out_and_said(prefix: str, tmp_path: Path) -> None:
    source = lightning(tmp_path, sgd, prefix=prefix)
    parts = sgd()
    with begin(tmp_path, source, parts) as run:
        assert "model: its names are taken without" in said(run)
    assert bits(states(parts)) == bits(states(trained(sgd)))


def test_names_that_fit_only_in_part_are_left_as_they_are_and_refused(tmp_path: Path) -> None:
    source = lightning(tmp_path, sgd)
    content = torch.load(source, weights_only=True)
    content["state_dict"]["model.extra"] = torch.ones(1)
    torch.save(content, source)
    words = refused(tmp_path, source, sgd())
    assert "model: 0.weight: the checkpoint lacks it" in words
    assert "model: model.extra: the model lacks it" in words
    parts = sgd()
    with begin(tmp_path, source, parts, rename={"model.model": "model"}, allow=["model.extra"]) as run:
        assert "begins with a difference: model: extra: the model lacks it" in said(run)
    assert bits(states(parts)) == bits(states(trained(sgd)))


@pytest.mark.parametrize("kind", [{}, {"is_sharded": True}, {"is_pickled": True}])
def test_training_of_the_trainer_goes_on_bit_for_bit(kind: dict[str, bool], tmp_path: Path) -> None:
    source = trainer(tmp_path, stepped, **kind)
    parts = stepped()
    with begin(tmp_path, source, parts) as run:
        assert run.step_count == 4
        assert "its epoch is 2" in said(run)
        train(parts, 3, run.step)
    assert bits(states(parts)) == bits(states(trained(stepped, 7)))


def test_training_of_accelerate_goes_on_bit_for_bit(tmp_path: Path) -> None:
    found = states(trained(stepped))
    folder = tmp_path / "state"
    folder.mkdir()
    save_file(found["model"], folder / "model.safetensors")
    torch.save(found["optimizer"], folder / "optimizer.bin")
    torch.save(found["scheduler"], folder / "scheduler.bin")
    torch.save({"step": 9, "torch_manual_seed": torch.get_rng_state()}, folder / "random_states_0.pkl")
    parts = stepped()
    with begin(tmp_path, folder, parts) as run:
        assert run.step_count == 4
        train(parts, 3, run.step)
    assert bits(states(parts)) == bits(states(trained(stepped, 7)))


@pytest.mark.parametrize("name", ["weights.pt", "weights.safetensors"])
def test_weights_alone_are_taken_once_the_optimizer_may_begin_anew(name: str, tmp_path: Path) -> None:
    old = trained(adam)["model"].state_dict()
    (save_file if name.endswith("safetensors") else torch.save)(old, tmp_path / name)
    words = refused(tmp_path, tmp_path / name, adam())
    assert "optimizer: the checkpoint lacks this part" in words
    parts = adam()
    with begin(tmp_path, tmp_path / name, parts, fresh=["optimizer"]) as run:
        assert "optimizer: begins as the script built it" in said(run)
        assert run.step_count == 0
    assert bits(parts["model"].state_dict()) == bits(old)


def test_a_gradient_scaler_goes_on_as_it_was(tmp_path: Path) -> None:
    def scaled() -> Parts:
        return {**sgd(), "scaler": torch.amp.GradScaler("cpu", growth_interval=3)}

    def train_scaled(parts: Parts, count: int) -> None:
        for _ in range(count):
            parts["optimizer"].zero_grad()
            loss = ((parts["model"](INPUTS) - TARGETS) ** 2).mean()
            parts["scaler"].scale(loss).backward()
            parts["scaler"].step(parts["optimizer"])
            parts["scaler"].update()

    old, whole, parts = scaled(), scaled(), scaled()
    train_scaled(old, 4)
    torch.save(
        {
            "net": old["model"].state_dict(),
            "amp": old["scaler"].state_dict(),
            "optim": old["optimizer"].state_dict(),
        },
        tmp_path / "old.pt",
    )
    train_scaled(whole, 7)
    with begin(tmp_path, tmp_path / "old.pt", parts) as run:
        assert parts["scaler"].state_dict()["_growth_tracker"] == 1
        train_scaled(parts, 3)
        run.step()
    assert bits(states(parts)) == bits(states(whole))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first, self.last = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.last.weight = self.first.weight


def test_of_tied_weights_a_file_may_have_one_alone(tmp_path: Path) -> None:
    weight = torch.full((4, 4), 2.0)
    save_file({"first.weight": weight}, tmp_path / "old.safetensors")
    tied = Tied()
    with begin(tmp_path, tmp_path / "old.safetensors", {"model": tied}):
        assert torch.equal(tied.last.weight, weight)
        assert tied.last.weight is tied.first.weight
    torch.save({"first.weight": weight, "last.weight": weight + 1}, tmp_path / "other.pt")
    words = refused(tmp_path / "other", tmp_path / "other.pt", {"model": Tied()})
    assert "last.weight: has other values than first.weight" in words


def test_a_parameter_that_never_had_a_gradient_has_no_moments_and_that_is_said(tmp_path: Path) -> None:
    def frozen() -> Parts:
        parts = adam()
        parts["model"][0].bias.requires_grad_(False)
        return parts

    source = saved(tmp_path / "old.pt", frozen)
    parts = frozen()
    with begin(tmp_path, source, parts) as run:
        assert "optimizer: it has nothing for model.0.bias, as for what never had a gradient" in said(run)
        train(parts, 2, run.step)
    assert bits(states(parts)) == bits(states(trained(frozen, 6)))
    assert not parts["model"][0].bias.requires_grad


def test_the_rate_is_that_of_the_file_unless_the_scripts_is_asked_for(tmp_path: Path) -> None:
    source = saved(tmp_path / "old.pt", adam)
    other = of_kind(torch.optim.Adam, amsgrad=True)
    for choice, rate in (((), 0.05), (("optimizer.lr",), 0.2)):
        parts = other()
        parts["optimizer"].param_groups[0]["lr"] = 0.2
        with begin(tmp_path / str(rate), source, parts, override=choice) as run:
            assert "group 0 lr: " in said(run)
        assert parts["optimizer"].param_groups[0]["lr"] == rate


def test_a_run_begins_from_a_checkpoint_of_another_run(tmp_path: Path) -> None:
    parts = stepped()
    with unbroken.Run(tmp_path / "first", **parts) as run:
        train(parts, 4, run.step)
    for number, source in enumerate((tmp_path / "first", tmp_path / "first/checkpoints/step-00000004")):
        parts = stepped()
        with begin(tmp_path / str(number), source, parts) as run:
            assert (run.step_count, run.restored) == (4, None)
            assert "step 4 is that of the other run" in said(run)
            train(parts, 3, run.step)
        assert bits(states(parts)) == bits(states(trained(stepped, 7)))
    words = refused(tmp_path, tmp_path / "first", sgd())
    assert "scheduler: the program lacks this part" in words
    assert "optimizer: class torch.optim.sgd.SGD, the checkpoint has class" in words


def test_a_run_that_began_so_is_resumed_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    source = saved(tmp_path / "old.pt", stepped)

    def epochs(parts: Parts, stop: int | None = None) -> None:
        torch.manual_seed(3)
        data = torch.utils.data.TensorDataset(INPUTS, TARGETS)
        loader = torch.utils.data.DataLoader(data, batch_size=2, shuffle=True)
        with begin(tmp_path / str(stop), source, parts, save=[unbroken.EverySteps(1)]) as run:
            for _ in run.epochs(2):
                for _ in run.batches(loader):
                    train(parts, 1, run.step)
                    if run.step_count == stop:
                        raise KeyboardInterrupt

    whole, stopped, again = stepped(), stepped(), stepped()
    epochs(whole)
    with pytest.raises(KeyboardInterrupt):
        epochs(stopped, 8)
    (tmp_path / "8").rename(tmp_path / "None-resumed")
    (tmp_path / "None").rename(tmp_path / "whole")
    (tmp_path / "None-resumed").rename(tmp_path / "None")
    epochs(again)
    assert bits(states(again)) == bits(states(whole))


def test_a_part_that_begins_anew_leaves_its_state_in_the_file(tmp_path: Path) -> None:
    source = saved(tmp_path / "old.pt", stepped)
    parts = grouped(lambda optimizer: CosineAnnealingLR(optimizer, 9))
    with begin(tmp_path, source, parts, fresh=["scheduler"]) as run:
        assert run.started_from is not None
        assert run.started_from.fresh == ("scheduler",)
        assert run.step_count == 4
    assert parts["scheduler"].last_epoch == 0


def test_a_run_that_began_elsewhere_goes_back_to_where_it_began(tmp_path: Path) -> None:
    source, parts = saved(tmp_path / "old.pt", sgd, global_step=4), sgd()
    rows = torch.linspace(-1, 1, 96).reshape(24, 4)
    rows[7] = float("nan")
    loader = DataLoader(TensorDataset(rows), batch_size=6)
    with begin(tmp_path, source, parts, health=unbroken.Health()) as run:
        for _ in run.epochs(1):
            for (batch,) in run.batches(loader):
                parts["optimizer"].zero_grad()
                loss = parts["model"](batch).square().mean()
                loss.backward()
                parts["optimizer"].step()
                run.step(loss=loss)
    # It was at step 4 then, and leaves one batch of four out.
    (back,) = events(tmp_path / "run", "rolled-back")
    assert (back["step"], back["in_process"]) == (4, True)
    assert run.step_count == 4 + 3
