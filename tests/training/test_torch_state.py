"""Modules, scalers, generators, arrays: restored bit for bit, or refused."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from unbroken import Run
from unbroken.checkpoint.store import CheckpointStore
from unbroken.errors import StateMismatchError, UnsupportedStateError
from unbroken.frameworks.torch.tensors import TensorHandler

from .runs import restore, save, small_model


class TestModules:
    def test_wrappers_change_no_names(self, tmp_path: Path) -> None:
        model = small_model()
        save(tmp_path, model=nn.DataParallel(model))
        again = small_model()
        restore(tmp_path, model=torch.compile(again))
        for one, two in zip(model.parameters(), again.parameters(), strict=True):
            assert torch.equal(one, two)

    def test_tied_weights_are_kept_once_and_stay_tied(self, tmp_path: Path) -> None:
        def build(is_tied: bool) -> nn.Module:
            model = nn.ModuleDict({"embed": nn.Embedding(5, 3), "head": nn.Linear(3, 5, bias=False)})
            if is_tied:
                model["head"].weight = model["embed"].weight  # type: ignore[assignment]
            return model

        model = build(True)
        save(tmp_path, model=model)
        tensors = CheckpointStore(tmp_path).latest().manifest.tensors
        assert tensors["model/embed.weight"].aliases == ("model/head.weight",)
        assert "model/head.weight" not in tensors
        again = build(True)
        restore(tmp_path, model=again)
        assert again["head"].weight is again["embed"].weight  # type: ignore[index]
        assert torch.equal(again["embed"].weight, model["embed"].weight)  # type: ignore[index]
        with pytest.raises(StateMismatchError, match="tied in the checkpoint, not here"):
            restore(tmp_path, model=build(False))

    def test_a_view_costs_its_own_elements_and_odd_strides_keep_their_values(self, tmp_path: Path) -> None:
        big = torch.arange(100_000.0)
        parts = {
            "view": big[::10_000],
            "turned": torch.arange(6.0).reshape(2, 3).t(),
            "none": torch.zeros(0, 3),
        }
        save(tmp_path, **parts)
        assert CheckpointStore(tmp_path).latest().manifest.tensors["view"].size_bytes == 40
        again = {name: torch.zeros_like(value) for name, value in parts.items()}
        restore(tmp_path, **again)
        for name, value in parts.items():
            assert torch.equal(again[name], value)

    @pytest.mark.parametrize(
        "dtype",
        [
            torch.bool,
            torch.uint8,
            torch.int16,
            torch.bfloat16,
            torch.float16,
            torch.float64,
            torch.complex64,
            torch.float8_e4m3fn,
            torch.float8_e5m2,
            torch.float8_e4m3fnuz,
            torch.float8_e5m2fnuz,
            torch.float8_e8m0fnu,
            torch.uint64,
        ],
        ids=str,
    )
    def test_every_dtype_of_the_format_keeps_its_bits(self, tmp_path: Path, dtype: torch.dtype) -> None:
        bits = torch.randint(0, 2, (3, 16), dtype=torch.uint8)
        value = bits.view(dtype) if dtype != torch.bool else bits.bool()
        save(tmp_path, value=value)
        again = torch.zeros_like(value)
        restore(tmp_path, value=again)
        assert torch.equal(again.view(torch.uint8), value.view(torch.uint8))

    @pytest.mark.parametrize(
        ("value", "problem"),
        [
            (lambda: nn.Linear(2, 2, device="meta"), "on the meta device"),
            (lambda: nn.LazyLinear(2), "not initialised yet"),
            (lambda: {"x": torch.eye(2).to_sparse()}, "of layout torch.sparse_coo"),
            (lambda: {"x": torch.eye(2).to_sparse_csr()}, "of layout torch.sparse_csr"),
            (lambda: {"x": torch.zeros(2, dtype=torch.complex128)}, "of dtype torch.complex128"),
            (lambda: {"x": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])}, "that is nested"),
            (lambda: {"x": _jagged()}, "that is nested"),
            (
                lambda: {"x": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)},
                "of dtype torch.qint8",
            ),
            (lambda: torch.ao.nn.quantized.Linear(2, 2), "of dtype torch.qint8"),
        ],
        ids=["meta", "lazy", "coo", "csr", "complex128", "nested", "jagged", "quantized", "quantized module"],
    )
    def test_what_has_no_bytes_to_keep_is_refused_by_its_path(
        self, tmp_path: Path, value: Callable[[], Any], problem: str
    ) -> None:
        with pytest.raises(
            UnsupportedStateError, match=f"^part/.*: cannot keep a tensor {problem}"
        ) as caught:
            save(tmp_path / "r", part=value())
        assert caught.value.hint
        assert not (tmp_path / "r").exists()

    def test_a_small_view_of_a_large_tensor_costs_its_own_elements_on_disk(self, tmp_path: Path) -> None:
        save(tmp_path, small=torch.zeros(100_000)[7:17])
        shards = list((tmp_path / "checkpoints").rglob("*.safetensors"))
        assert sum(shard.stat().st_size for shard in shards) < 40_000

    def test_views_of_every_kind_keep_their_values_and_fill_only_their_own_elements(
        self, tmp_path: Path
    ) -> None:
        def build(start: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            base = torch.arange(start, start + 24.0).reshape(4, 6)
            views = {"offset": base[1:2, 1:], "strided": base[2:, ::3], "turned": base[0].reshape(2, 3).t()}
            return base, views

        _, views = build(0)
        conj = torch.view_as_real(torch.tensor([1 + 2j]).conj().resolve_conj())
        parts: dict[str, Any] = {**views, "negative": torch.tensor([1 + 2j]).conj().imag, "conj": conj}
        assert parts["negative"].is_neg()
        save(tmp_path, **parts)
        base, again = build(100)
        before = base.clone()
        others: dict[str, Any] = {**again, "negative": torch.zeros(1), "conj": torch.zeros(1, 2)}
        restore(tmp_path, **others)
        for name, value in parts.items():
            assert torch.equal(others[name], value)
        for view in again.values():
            view.fill_(-1)
        assert torch.equal(base[base != -1], before[base != -1])

    @pytest.mark.parametrize("kind", ["slice", "turned", "flat"])
    def test_parameters_that_share_a_part_of_their_memory_stay_so_or_are_refused(
        self, tmp_path: Path, kind: str
    ) -> None:
        def build(is_shared: bool) -> nn.Module:
            model = nn.Module()
            whole = torch.randn(4, 4)
            part = {"slice": whole[1:3], "turned": whole.t(), "flat": whole.view(-1)}[kind]
            model.whole, model.other = nn.Parameter(whole), nn.Linear(2, 2)
            model.part = nn.Parameter(part if is_shared else part.clone())
            return model

        model = build(True)
        save(tmp_path / "shared", model=model)
        again = build(True)
        restore(tmp_path / "shared", model=again)
        for one, two in zip(model.parameters(), again.parameters(), strict=True):
            assert torch.equal(one, two)
        with pytest.raises(StateMismatchError, match="part, whole: share memory in the checkpoint, not here"):
            restore(tmp_path / "shared", model=build(False))
        save(tmp_path / "apart", model=build(False))
        with pytest.raises(StateMismatchError, match="part, whole: share memory here, not in the checkpoint"):
            restore(tmp_path / "apart", model=build(True))

    def test_slices_of_one_memory_that_do_not_overlap_are_no_matter(self, tmp_path: Path) -> None:
        def build(is_flat: bool) -> nn.Module:
            model = nn.Module()
            flat = torch.randn(12)
            pieces = flat[:6].view(2, 3), flat[6:]
            model.one, model.two = (nn.Parameter(piece if is_flat else piece.clone()) for piece in pieces)
            return model

        model, again = build(True), build(False)
        save(tmp_path, model=model)
        restore(tmp_path, model=again)
        assert torch.equal(model.one, again.one)  # type: ignore[arg-type]


class TestOtherParts:
    def test_a_gradient_scaler_keeps_its_scale_and_growth_counter(self, tmp_path: Path) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
        weight = nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        for _ in range(4):
            scaler.scale((weight * 2).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        expected = scaler.state_dict()
        assert expected["scale"] == 2.0**11
        save(tmp_path, scaler=scaler)
        again = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
        restore(tmp_path, scaler=again)
        assert again.state_dict() == expected

    def test_an_averaged_model_keeps_its_count(self, tmp_path: Path) -> None:
        model = nn.Linear(2, 2)
        average = torch.optim.swa_utils.AveragedModel(model)
        for _ in range(3):
            average.update_parameters(model)
        save(tmp_path, model=model, average=average)
        again = torch.optim.swa_utils.AveragedModel(nn.Linear(2, 2))
        restore(tmp_path, model=nn.Linear(2, 2), average=again)
        assert int(again.n_averaged) == 3

    def test_generators_of_all_libraries_go_on(self, tmp_path: Path) -> None:
        def build(seed: int) -> dict[str, Any]:
            return {
                "python": random.Random(seed),
                "numpy": np.random.default_rng(seed),
                "legacy": np.random.RandomState(seed),
                "torch": torch.Generator().manual_seed(seed),
            }

        def draw(generators: dict[str, Any]) -> list[float]:
            return [
                generators["python"].gauss(0, 1),
                float(generators["numpy"].normal()),
                float(generators["legacy"].normal()),
                float(torch.randn((), generator=generators["torch"])),
            ]

        generators = build(1)
        draw(generators)
        save(tmp_path, **generators)
        expected = draw(generators)
        again = build(2)
        restore(tmp_path, **again)
        assert draw(again) == expected

    def test_a_hand_made_dictionary_of_tensors_is_filled_in_place(self, tmp_path: Path) -> None:
        average = {"weight": torch.ones(3), "inner": {"list": [torch.zeros(2)]}, "n": 3}
        save(tmp_path, average=average)
        again: dict[str, Any] = {"weight": torch.zeros(3), "inner": {"list": [torch.ones(2)]}, "n": 0}
        held = again["weight"], again["inner"], again["inner"]["list"], again["inner"]["list"][0]
        restore(tmp_path, average=again)
        assert torch.equal(held[0], torch.ones(3))
        assert torch.equal(held[3], torch.zeros(2))
        assert again["n"] == 3
        assert again["weight"] is held[0]
        assert again["inner"] is held[1]
        assert again["inner"]["list"] is held[2]

    def test_arrays_scalars_and_dataclasses_keep_their_types(self, tmp_path: Path) -> None:
        save(
            tmp_path,
            array=np.arange(6, dtype=np.int16).reshape(2, 3),
            values={
                "scalar": np.float32(0.1),
                "dtype": np.dtype("int8"),
                "torch": torch.float16,
                "size": torch.Size([2]),
            },
            progress=Progress(best=0.5, history=[(1, 0.1)]),
        )
        array = np.zeros((2, 3), dtype=np.int16)
        values: dict[str, Any] = {}
        progress = Progress()
        restore(tmp_path, array=array, values=values, progress=progress)
        assert array.tolist() == [[0, 1, 2], [3, 4, 5]]
        assert isinstance(values["scalar"], np.float32)
        assert values["scalar"] == np.float32(0.1)
        assert (values["dtype"], values["torch"], values["size"]) == (
            np.dtype("int8"),
            torch.float16,
            torch.Size([2]),
        )
        assert progress == Progress(best=0.5, history=[(1, 0.1)])

    def test_an_object_that_does_not_restore_what_it_saved_is_caught(self, tmp_path: Path) -> None:
        class Forgetful:
            patience = 0

            def state_dict(self) -> dict[str, int]:
                return {"patience": self.patience}

            def load_state_dict(self, state: dict[str, int]) -> None:
                pass

        stopper = Forgetful()
        stopper.patience = 3
        save(tmp_path, stopper=stopper)
        with pytest.raises(StateMismatchError, match="read back the live state differs at stopper"):
            restore(tmp_path, stopper=Forgetful())


def _jagged() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)


@dataclass
class Progress:
    best: float = 0.0
    history: list[tuple[int, float]] = field(default_factory=list)


def test_a_tensor_without_memory_of_its_own_is_refused_before_training(tmp_path: Path) -> None:
    class Wrapper(torch.Tensor):
        """As quantized and distributed tensors are made: it holds others, and says that it lies in memory."""

        @staticmethod
        def __new__(cls) -> Any:
            return torch.Tensor._make_wrapper_subclass(cls, (3, 4), dtype=torch.float32)

        @classmethod
        def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise NotImplementedError(function)

    with pytest.raises(UnsupportedStateError, match="of class Wrapper, which has no memory of its own"):
        Run(tmp_path, counters={"wrapped": Wrapper()}).__enter__()


@pytest.mark.parametrize(
    "live", [torch.zeros(3), torch.zeros(2, 2), torch.zeros(())], ids=["3", "2x2", "scalar"]
)
def test_a_tensor_of_another_shape_stays_as_it_is_where_that_is_allowed(live: torch.Tensor) -> None:
    handler = TensorHandler()
    assert [found.kind for found in handler.differences(live, torch.ones(1))] == ["shape"]
    handler.restore(live, torch.ones(1))
    assert not live.any()
