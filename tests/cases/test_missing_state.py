"""Missing state: whatever steers training is in the checkpoint, and what is not there is named."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader

import unbroken
from unbroken.errors import StateMismatchError, UnsupportedStateError

from . import broken
from .scenes import Broken, Brokens, ask_to_stop, batch, fails, restore, run_of, save, stopped, train


class Patience:
    """Early stopping, as most people write it."""

    def __init__(self, patience: int = 3) -> None:
        self.patience = patience
        self.best = math.inf
        self.bad = 0

    def is_over(self, loss: float) -> bool:
        self.bad = 0 if loss < self.best else self.bad + 1
        self.best = min(loss, self.best)
        return self.bad >= self.patience


class PatienceWithMethods(Patience):
    def state_dict(self) -> dict[str, Any]:
        return vars(self).copy()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


@dataclass
class PatienceOfFields(Patience):
    patience: int = 3
    best: float = math.inf
    bad: int = 0


# The place of the counter in the state of each.
KINDS = [
    pytest.param(PatienceWithMethods, broken.objects_with_methods, ("bad",), id="with methods"),
    pytest.param(PatienceOfFields, broken.dataclasses, ("bad",), id="dataclass"),
    pytest.param(Patience, broken.plain_objects, ("attributes", "bad"), id="plain object"),
]


class TestEarlyStopping:
    """A patience that begins anew with each attempt never ends (huggingface/transformers#28544)."""

    @pytest.mark.parametrize(("make", "handler", "place"), KINDS)
    def test_the_third_evaluation_in_vain_stops_the_run_however_often_it_was_resumed(
        self, tmp_path: Path, make: Callable[[], Patience], handler: Broken, place: tuple[str, ...]
    ) -> None:
        self.play(tmp_path, make, ())

    @pytest.mark.parametrize(("make", "handler", "place"), KINDS)
    def test_it_never_stops_where_the_counter_is_forgotten(
        self, tmp_path: Path, make: Callable[[], Patience], handler: Broken, place: tuple[str, ...]
    ) -> None:
        with fails():
            self.play(tmp_path, make, (broken.forgetting(handler, *place),))

    def test_an_object_whose_state_cannot_be_kept_is_refused_by_the_name_of_its_part(
        self, tmp_path: Path
    ) -> None:
        patience = Patience()
        patience.on_stop = print  # type: ignore[attr-defined]
        with pytest.raises(UnsupportedStateError, match=r"patience/.*on_stop"):
            save(tmp_path, patience=patience)

    def play(self, directory: Path, make: Callable[[], Patience], wrong: Brokens) -> None:
        over = [
            evaluation
            for _attempt in range(3)
            for evaluation, is_over in self.attempt(directory, make(), wrong)
            if is_over
        ]
        assert over[:1] == [4]

    def attempt(self, directory: Path, patience: Patience, wrong: Brokens) -> list[tuple[int, bool]]:
        found = []
        with run_of(directory, wrong, patience=patience) as run:
            for _ in range(2):
                run.step()
                # The first evaluation is the best there will be.
                found.append((run.step_count, patience.is_over(float(run.step_count))))
        return found


class WarmingUp(nn.Module):
    """Counts its calls in a plain attribute, and what it does depends on them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 2)
        self.calls = 0

    def forward(self, inputs: torch.Tensor) -> Any:
        self.calls += 1
        return self.inner(inputs) * min(self.calls / 10, 1)


class TestCountersOfModules:
    """Counters that are neither parameters nor buffers are in no state_dict."""

    def built(self, seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        model = WarmingUp()
        return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}

    def play(self, directory: Path, wrong: Brokens) -> None:
        twin = self.built(1)
        expected = train(twin["model"], twin["optimizer"], range(12))
        parts = self.built(1)
        with run_of(directory, wrong, **parts) as run:
            losses = train(parts["model"], parts["optimizer"], range(5))
            run.step()
        parts = self.built(2)
        restore(directory, wrong, **parts)
        assert losses + train(parts["model"], parts["optimizer"], range(5, 12)) == expected

    def test_a_counter_in_a_plain_attribute_goes_on(self, tmp_path: Path) -> None:
        self.play(tmp_path, ())

    def test_it_does_not_where_tensors_only_are_kept(self, tmp_path: Path) -> None:
        with fails():
            self.play(tmp_path, (broken.NoAttributes,))


class TestAverages:
    """Weights, their average and its count are three things (ultralytics/yolov5#310)."""

    @staticmethod
    def ramp(average: torch.Tensor, weight: torch.Tensor, count: Any) -> torch.Tensor:
        decay = 0.99 * (1 - math.exp(-float(count) / 20))
        return decay * average + (1 - decay) * weight

    def built(self) -> dict[str, Any]:
        model = nn.Linear(4, 2)
        return {
            "model": model,
            "average": AveragedModel(model, avg_fn=self.ramp),
            "optimizer": torch.optim.SGD(model.parameters(), lr=0.05),
        }

    def trained(self, parts: dict[str, Any], steps: range) -> dict[int, Any]:
        """Return weights, average and count after step 31 and after step 60."""
        seen = {}
        for step in steps:
            train(parts["model"], parts["optimizer"], range(step, step + 1))
            parts["average"].update_parameters(parts["model"])
            if step in (31, 60):
                tensors = {**parts["model"].state_dict(), **parts["average"].state_dict()}
                seen[step] = {name: tensor.tolist() for name, tensor in tensors.items()}
        return seen

    def play(self, directory: Path, wrong: Brokens) -> None:
        torch.manual_seed(1)
        expected = self.trained(self.built(), range(1, 61))
        torch.manual_seed(1)
        parts = self.built()
        self.trained(parts, range(1, 31))
        save(directory, wrong, **parts)
        torch.manual_seed(2)
        parts = self.built()
        restore(directory, wrong, **parts)
        assert self.trained(parts, range(31, 61)) == expected

    def test_weights_average_and_count_go_on_each_by_itself(self, tmp_path: Path) -> None:
        self.play(tmp_path, ())

    @pytest.mark.parametrize(
        "wrong",
        [broken.OnlyTheAverage, broken.forgetting(broken.modules, "n_averaged")],
        ids=["only the average", "no count"],
    )
    def test_they_do_not_where_one_of_them_is_left_out(self, tmp_path: Path, wrong: Broken) -> None:
        with fails():
            self.play(tmp_path, (wrong,))


class TestScalers:
    """A loss scaler that begins from its default makes a run unstable (ultralytics/ultralytics#22189)."""

    def built(self) -> dict[str, Any]:
        model = nn.Linear(2, 1)
        return {
            "model": model,
            "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
            "scaler": torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3),
        }

    def scales(self, parts: dict[str, Any], steps: int) -> list[float]:
        found = []
        for step in range(steps):
            parts["optimizer"].zero_grad()
            parts["scaler"].scale(parts["model"](batch(step, 3, 2)).mean()).backward()
            parts["scaler"].step(parts["optimizer"])
            parts["scaler"].update()
            found.append(parts["scaler"].get_scale())
        return found

    def play(self, directory: Path, wrong: Brokens) -> None:
        parts = self.built()
        self.scales(parts, 4)
        save(directory, wrong, **parts)
        kept = parts["scaler"].state_dict()
        expected = self.scales(parts, 4)
        again = self.built()
        restore(directory, wrong, **again)
        assert again["scaler"].state_dict() == kept
        # It grows at the sixth step, which is the second from here.
        assert self.scales(again, 4) == expected == [2.0**11, 2.0**12, 2.0**12, 2.0**12]

    def test_scale_and_growth_counter_go_on(self, tmp_path: Path) -> None:
        self.play(tmp_path, ())

    @pytest.mark.parametrize("key", ["scale", "_growth_tracker"])
    def test_they_do_not_where_one_of_them_is_forgotten(self, tmp_path: Path, key: str) -> None:
        with fails():
            self.play(tmp_path, (broken.forgetting(broken.objects_with_methods, key),))

    def test_a_checkpoint_without_the_scaler_is_refused_by_its_name(self, tmp_path: Path) -> None:
        parts = self.built()
        del parts["scaler"]
        save(tmp_path, **parts)
        again = self.built()
        weight = again["model"].weight.clone()
        with pytest.raises(StateMismatchError, match="scaler: the checkpoint lacks this part"):
            restore(tmp_path, **again)
        assert torch.equal(again["model"].weight, weight)


class TestOneDrawAhead:
    """Making an iterator draws from the generator that was restored (NVIDIA-NeMo/Megatron-Bridge#5257)."""

    def masks(self, directory: Path, wrong: Brokens, stop_at: int = 0) -> list[Any]:
        loader = DataLoader(list(range(10)), batch_size=2, shuffle=True)
        found = []
        with run_of(directory, wrong, counters={}) as run:
            for _ in run.epochs(2):
                for indices in run.batches(loader):
                    mask = nn.functional.dropout(torch.ones(8), 0.5)
                    found.append((indices.tolist(), mask.tolist()))
                    run.step()
                    if run.step_count == stop_at:
                        self.stopped_masks = found
                        ask_to_stop()
        return found

    def play(self, directory: Path, wrong: Brokens) -> None:
        torch.manual_seed(1)
        expected = self.masks(directory / "twin", ())
        torch.manual_seed(1)
        with stopped():
            self.masks(directory / "run", wrong, stop_at=3)
        torch.manual_seed(2)
        assert self.stopped_masks + self.masks(directory / "run", wrong) == expected

    def test_the_first_dropout_mask_after_a_stop_inside_an_epoch_is_the_next_one(
        self, tmp_path: Path
    ) -> None:
        self.play(tmp_path, ())

    def test_it_is_another_where_generators_are_restored_before_the_iterator_is_made(
        self, tmp_path: Path
    ) -> None:
        with fails():
            self.play(tmp_path, (broken.restoring_once(broken.randomness),))


class TestEndOfEpoch:
    """The saved counter was an epoch old, and a start hook reset it (Lightning-AI/pytorch-lightning#1464)."""

    def attempt(self, directory: Path, wrong: Brokens, epochs: int) -> Patience:
        patience = PatienceOfFields()
        with run_of(directory, wrong, save=[unbroken.EveryEpochs(1)], patience=patience) as run:
            # A hook at the start of training that begins everything anew.
            patience.bad, patience.best = 0, math.inf
            for epoch in run.epochs(epochs):
                run.step()
                if epoch == 2:
                    raise RuntimeError("as good as a crash: nothing is saved from here on")
                # After everything else that belongs to the epoch, also after a checkpoint was asked for.
                run.record(loss=1.0)
                patience.bad += 1
        return patience

    def play(self, directory: Path, wrong: Brokens) -> None:
        with pytest.raises(RuntimeError):
            self.attempt(directory, wrong, epochs=3)
        saved = unbroken.CheckpointStore(directory).latest()
        assert (saved.manifest.position.epoch, saved.load()["patience"]["bad"]) == (2, 2)
        again = self.attempt(directory, wrong, epochs=2)
        assert again.bad == 2

    def test_what_is_counted_last_in_an_epoch_is_in_its_checkpoint_and_no_start_hook_resets_it(
        self, tmp_path: Path
    ) -> None:
        self.play(tmp_path, ())

    @pytest.mark.parametrize(
        "wrong",
        [broken.one_capture_late(broken.dataclasses), broken.restoring_once(broken.dataclasses)],
        ids=["captured before the others", "restored before the hooks"],
    )
    def test_it_is_not_where_state_is_taken_too_early_or_put_back_too_early(
        self, tmp_path: Path, wrong: Broken
    ) -> None:
        with fails():
            self.play(tmp_path, (wrong,))
