"""Which weights are served, how they come into the module, and what is told when they do not."""

from __future__ import annotations

import copy
import math
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import unbroken
from unbroken.checkpoint.manifest import Validation
from unbroken.checkpoint.store import Checkpoint, CheckpointStore
from unbroken.errors import (
    CheckpointNotFoundError,
    StateMismatchError,
    UnsupportedStateError,
    UsageError,
)
from unbroken.rundir.rollbacks import Rollback, add_rollback

from ..training.runs import tree_of
from .stamped import Requests, Stamped, eventually, save, stamp


def watched(run: Path, module: nn.Module | None = None, **options: Any) -> Any:
    options = {"every_seconds": 0.002, "wait_seconds": 0, **options}
    return unbroken.watch(run, Stamped() if module is None else module, **options)


def roll_back(run: Path, *, to: int) -> None:
    add_rollback(
        run, Rollback(decided_by="health", reason="a spike", attempt=1, found_step=to + 9, trusted_step=to)
    )


def waits_for_a_request(live: Any) -> bool:
    return bool(live._turns._changed._waiters)


class TestTheFirst:
    def test_a_directory_that_is_not_there_yet_is_waited_for(self, tmp_path: Path) -> None:
        run = tmp_path / "later/run"
        timer = threading.Timer(0.05, save, (run, 3))
        timer.start()
        with watched(run, wait_seconds=20) as live:
            assert live() == {3.0}
        timer.join()

    def test_the_wait_has_an_end_and_leaves_the_module_as_it_was(self, tmp_path: Path) -> None:
        module = stamp(Stamped(), 7)
        with pytest.raises(CheckpointNotFoundError, match="within 0 s"):
            watched(tmp_path / "never", module)
        assert module() == {7.0}

    def test_a_module_that_does_not_fit_is_an_error_at_once(self, tmp_path: Path) -> None:
        save(tmp_path, 1)
        with pytest.raises(StateMismatchError, match=r"layers\.0\.weight: shape \(1, 5\)"):
            watched(tmp_path, Stamped(5))
        with pytest.raises(StateMismatchError, match=r"norm\.bias"):
            watched(tmp_path, nn.Linear(1, 1))
        with pytest.raises(UnsupportedStateError, match="found <class 'list'>"):
            watched(tmp_path, [])  # type: ignore[arg-type]

    def test_of_several_modules_one_is_to_be_named(self, tmp_path: Path) -> None:
        save(tmp_path, 1, parts={"model": stamp(Stamped(), 1), "teacher": stamp(Stamped(), 2)})
        with pytest.raises(UsageError, match="one of the modules model, teacher"):
            watched(tmp_path)
        with watched(tmp_path, part="teacher") as live:
            assert live() == {2.0}

    def test_nothing_is_written_into_the_run(self, tmp_path: Path) -> None:
        save(tmp_path, 1)
        before = tree_of(tmp_path)
        with watched(tmp_path) as live:
            live()
        assert tree_of(tmp_path) == before


class TestTheNext:
    def test_newer_weights_come_into_what_is_served(self, tmp_path: Path) -> None:
        save(tmp_path, 1)
        with watched(tmp_path) as live:
            for step in (2, 3, 4):
                save(tmp_path, step)
                eventually(lambda step=step: live.checkpoint.step == step)
                assert live() == {float(step)}

    def test_a_request_keeps_its_weights_and_the_copy_that_it_uses_is_not_touched(
        self, tmp_path: Path
    ) -> None:
        save(tmp_path, 1)
        with watched(tmp_path) as live:
            with live.current() as now:
                save(tmp_path, 2)
                eventually(lambda: live.checkpoint.step == 2)
                save(tmp_path, 3)
                # There are two copies, and both are in use or were: the third waits.
                eventually(lambda: waits_for_a_request(live))
                assert (now.module(), now.checkpoint.step) == ({1.0}, 1)
                assert live() == {2.0}
            eventually(lambda: live.checkpoint.step == 3)

    def test_the_best_is_by_a_metric_and_a_worse_one_is_never_taken(self, tmp_path: Path) -> None:
        for step, accuracy in enumerate([0.5, 0.9, 0.8], start=1):
            save(tmp_path, step, metrics={"accuracy": accuracy, "loss": 1 - accuracy})
        save(tmp_path, 4)
        lowest = unbroken.KeepBest(1, "loss", mode="min")
        with watched(tmp_path, best="accuracy") as live, watched(tmp_path, best=lowest) as other:
            assert (live(), other()) == ({2.0}, {2.0})
            save(tmp_path, 5, metrics={"accuracy": 0.9, "loss": math.inf})
            CheckpointStore(tmp_path).prune([unbroken.KeepLast(1)])
            save(tmp_path, 6, metrics={"accuracy": 0.95, "loss": 0.05})
            eventually(lambda: live.checkpoint.step == other.checkpoint.step == 6)

    def test_what_holds_nan_or_was_not_validated_is_passed_over_and_told(
        self, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        save(tmp_path, 1, validation=Validation(passed=True))
        bad = Stamped()
        stamp(bad, 2)
        with torch.no_grad():
            bad.layers[2].bias.fill_(math.nan)  # type: ignore[operator,union-attr]
        with watched(tmp_path) as live:
            save(tmp_path, 2, module=bad)
            eventually(lambda: "step-00000002 is passed over" in str(live.problem))
            save(tmp_path, 3, validation=Validation(passed=False, reason="accuracy 0.1"))
            eventually(lambda: "step-00000003 is passed over: not validated" in str(live.problem))
            assert live() == {1.0}
        told = capfd.readouterr().err
        assert "model.layers.2.bias holds NaN" in told
        with watched(tmp_path, non_finite=["model.layers.2.*"]) as live:
            assert live.checkpoint.step == 2

    def test_running_statistics_are_to_be_finite_whoever_has_looked_at_them(
        self, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        model = stamp(Stamped(), 1)
        save(tmp_path / "nobody", 1, module=model)
        may = ["model.norm.running_mean"]
        every = [unbroken.EverySteps(1)]
        with unbroken.Run(tmp_path / "the run", save=every, model=model, non_finite=may) as run:
            run.step()
            model.norm.running_mean.fill_(-math.inf)  # type: ignore[operator,union-attr]
            run.step()
        save(tmp_path / "nobody", 2, module=model)
        for directory in tmp_path.iterdir():
            with watched(directory) as live:
                assert live() == {1.0}
            assert "model.norm.running_mean holds NaN or infinity" in capfd.readouterr().err
            with watched(directory, non_finite=may) as live:
                assert live() == {1.0, -math.inf}

    def test_after_a_roll_back_what_it_undid_is_replaced_by_what_is_good(self, tmp_path: Path) -> None:
        for step in (10, 20, 30):
            save(tmp_path, step)
        with watched(tmp_path) as live:
            assert live() == {30.0}
            roll_back(tmp_path, to=20)
            eventually(lambda: live.checkpoint.step == 20)
            assert live() == {20.0}
            CheckpointStore(tmp_path).quarantine("step-00000030", "tainted")
            save(tmp_path, 30, module=stamp(Stamped(), 31), rollbacks=1)
            eventually(lambda: live.checkpoint.step == 30)
            assert live() == {31.0}

    def test_what_the_run_sets_aside_is_replaced_and_what_it_prunes_is_not(self, tmp_path: Path) -> None:
        store = CheckpointStore(tmp_path)
        for step in (1, 2):
            save(tmp_path, step)
        with watched(tmp_path) as live:
            store.storage.delete("checkpoints/step-00000002")
            time.sleep(0.05)
            assert live() == {2.0}
            save(tmp_path, 3)
            eventually(lambda: live.checkpoint.step == 3)
            store.quarantine("step-00000003", "set aside")
            eventually(lambda: live.checkpoint.step == 1)
            assert "set aside" not in str(live.problem)

    def test_a_checkpoint_that_is_pruned_while_it_is_read_gives_way_to_the_next(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        load, store = Checkpoint.load_into, CheckpointStore(tmp_path)

        def pruned_first(self: Checkpoint, memory: Any) -> None:
            if self.step == 2:
                save(tmp_path, 3)
                store.storage.delete("checkpoints/step-00000002")
            load(self, memory)

        save(tmp_path, 1)
        with watched(tmp_path) as live:
            monkeypatch.setattr(Checkpoint, "load_into", pruned_first)
            save(tmp_path, 2)
            eventually(lambda: live.checkpoint.step == 3)
            assert live() == {3.0}
            assert live.problem is None

    def test_a_run_that_is_begun_anew_in_its_directory_is_followed(self, tmp_path: Path) -> None:
        save(tmp_path / "run", 7)
        with watched(tmp_path / "run") as live:
            (tmp_path / "run").rename(tmp_path / "old")
            save(tmp_path / "run", 1)
            eventually(lambda: live.checkpoint.step == 1)
            assert live() == {1.0}

    def test_a_run_that_cannot_be_read_is_told_and_looked_at_again(self, tmp_path: Path) -> None:
        save(tmp_path, 1)
        with watched(tmp_path) as live:
            (tmp_path / "rollbacks.json").write_text('{"rollbacks": 7}')
            save(tmp_path, 2)
            eventually(lambda: "expected a list of roll-backs" in str(live.problem))
            assert live() == {1.0}
            (tmp_path / "rollbacks.json").unlink()
            eventually(lambda: live.checkpoint.step == 2)
            assert live.problem is None

    def test_another_model_in_the_run_is_told_and_what_is_served_stays(self, tmp_path: Path) -> None:
        save(tmp_path, 1)
        with watched(tmp_path) as live:
            save(tmp_path, 2, module=Stamped(3))
            eventually(lambda: "is not like the one to serve" in str(live.problem))
            assert live() == {1.0}


class TestOnNew:
    def test_weights_are_tried_before_any_request_and_passed_over_if_that_fails(self, tmp_path: Path) -> None:
        tried = []

        def smoke_test(weights: Any) -> None:
            tried.append((weights.checkpoint.step, weights.module()))
            assert weights.checkpoint.step != 2, "answers nonsense"

        save(tmp_path, 1)
        with watched(tmp_path, on_new=smoke_test) as live:
            save(tmp_path, 2)
            eventually(lambda: "on_new says AssertionError: answers nonsense" in str(live.problem))
            assert live() == {1.0}
            save(tmp_path, 3)
            eventually(lambda: live.checkpoint.step == 3)
        assert tried == [(1, {1.0}), (2, {2.0}), (3, {3.0})]


class Rich(nn.Module):
    """Tied weights, a buffer, extra state, an attribute that training changes, all in what it answers."""

    table: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("table", torch.zeros(3))
        self.temperature, self.scales = 1.0, [0.0]

    def get_extra_state(self) -> dict[str, Any]:
        return {"scales": self.scales}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.scales = state["scales"]

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.embed(words) + self.table) / self.temperature
        return found + self.scales[0]


class Masked(nn.Module):
    """Masks as they are made with a module: one to add, and one of numbers that no half has."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("mask", torch.full((2, 2), -math.inf).triu(1))
        self.register_buffer("lowest", torch.full((2,), torch.finfo(torch.float32).min))


class TestTheModule:
    def test_ties_buffers_extra_state_and_attributes_come_with_the_weights(self, tmp_path: Path) -> None:
        trained, words = Rich(), torch.tensor([0, 3])
        with unbroken.Run(tmp_path, save=[unbroken.EverySteps(1)], model=trained) as run:
            run.step()
            with watched(tmp_path, Rich(), wait_seconds=20) as live:
                for _ in range(2):
                    with torch.no_grad():
                        trained.embed.weight.add_(1)
                        trained.table.add_(0.5)
                    trained.temperature += 1
                    trained.scales = [trained.scales[0] + 3.0]
                    run.step()
                    eventually(lambda: live.checkpoint.step == run.step_count)
                    assert torch.equal(live(words), trained(words))
                    with live.current() as now:
                        assert now.module.head.weight is now.module.embed.weight

    def test_an_averaged_model_serves_in_the_model_itself(self, tmp_path: Path) -> None:
        averaged = torch.optim.swa_utils.AveragedModel(stamp(Stamped(), 4))
        save(tmp_path, 1, parts={"model": Stamped(), "ema": averaged})
        with watched(tmp_path, part="ema") as live:
            assert live() == {4.0}
        with watched(tmp_path, torch.optim.swa_utils.AveragedModel(Stamped()), part="ema") as live:
            assert live() == {4.0}

    def test_floats_are_cast_to_the_dtype_that_serves_as_far_as_they_fit(self, tmp_path: Path) -> None:
        save(tmp_path, 3)
        with watched(tmp_path, Stamped().half()) as live:
            assert live() == {3.0}
            save(tmp_path, 70_000)
            eventually(lambda: "too large for torch.float16" in str(live.problem))
            assert live() == {3.0}

    def test_masks_of_infinity_serve_as_they_were_built(self, tmp_path: Path) -> None:
        save(tmp_path, 1, module=Masked())
        for module in (Masked(), Masked().half()):
            with watched(tmp_path, module) as live, live.current() as now:
                assert torch.equal(now.module.mask.float(), Masked().mask)
                assert torch.equal(now.module.lowest, Masked().to(now.module.lowest.dtype).lowest)

    def test_it_is_in_evaluation_mode_without_gradients_and_no_random_number_is_drawn(
        self, tmp_path: Path
    ) -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
        save(tmp_path, 1, module=copy.deepcopy(model).train())
        before = torch.get_rng_state()
        with watched(tmp_path, model) as live:
            save(tmp_path, 2, module=copy.deepcopy(model).train())
            eventually(lambda: live.checkpoint.step == 2)
            assert torch.equal(torch.get_rng_state(), before)
            with live.current() as now:
                assert not any(part.training for part in now.module.modules())
                assert not any(weight.requires_grad for weight in now.module.parameters())

    @pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
    def test_weights_on_a_gpu_are_never_mixed_either(self, tmp_path: Path) -> None:
        save(tmp_path, 1)
        with watched(tmp_path, Stamped().cuda()) as live, Requests(live) as requests:
            for step in range(2, 12):
                save(tmp_path, step)
                eventually(lambda step=step: live.checkpoint.step == step)
        assert len(requests.check()) > 5

    @pytest.mark.chaos
    def test_compiled_code_stays_valid_and_follows_the_weights(self, tmp_path: Path) -> None:
        model, x = nn.Linear(4, 4), torch.ones(2, 4)
        save(tmp_path, 1, module=stamp(nn.Linear(4, 4), 1))
        with watched(tmp_path, torch.compile(model, backend="eager")) as live:
            for step in range(2, 6):
                save(tmp_path, step, module=stamp(nn.Linear(4, 4), step))
                eventually(lambda step=step: live.checkpoint.step == step)
                assert torch.equal(live(x), torch.full((2, 4), 5.0 * step))


class TestTheEnd:
    def test_close_ends_the_thread_and_what_is_there_goes_on_serving(self, tmp_path: Path) -> None:
        save(tmp_path, 1)
        live = watched(tmp_path)
        live.close()
        live.close()
        assert not [thread for thread in threading.enumerate() if thread.name == "unbroken-watch"]
        assert live() == {1.0}

    def test_it_can_be_closed_from_on_new(self, tmp_path: Path) -> None:
        found: list[Any] = []
        save(tmp_path, 1)
        live = watched(tmp_path, on_new=lambda weights: found and found[0].close())
        found.append(live)
        save(tmp_path, 2)
        eventually(lambda: not live._thread.is_alive())
        assert live() == {2.0}

    def test_close_does_not_wait_for_a_request(self, tmp_path: Path) -> None:
        save(tmp_path, 1)
        live = watched(tmp_path)
        with live.current():
            save(tmp_path, 2)
            eventually(lambda: live.checkpoint.step == 2)
            save(tmp_path, 3)
            eventually(lambda: waits_for_a_request(live))
            live.close()

    def test_a_bug_in_the_thread_is_raised_where_it_is_closed(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(threading, "excepthook", lambda _: None)
        save(tmp_path, 1)
        live = watched(tmp_path)
        monkeypatch.setattr(live._refresh, "look", lambda _: 1 // 0)
        eventually(lambda: live.problem is not None)
        assert live.problem == "nothing new is looked for: integer division or modulo by zero"
        assert live() == {1.0}
        with pytest.raises(ZeroDivisionError):
            live.close()

    def test_a_process_forked_from_it_is_told_to_watch_by_itself(self, tmp_path: Path) -> None:
        save(tmp_path, 1)
        with watched(tmp_path) as live:
            child = os.fork()
            if child == 0:
                try:
                    live()
                except UsageError:
                    os._exit(7)
                os._exit(0)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
