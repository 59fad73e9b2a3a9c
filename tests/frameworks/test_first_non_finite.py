"""Where numbers stop being finite: in which module, which tensor, which sample of a batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from unbroken.frameworks.torch.first_non_finite import StepWatch, bad_rows, bad_tensors, is_finite
from unbroken.frameworks.torch.wrappers import PARALLEL

NAN, INFINITY = float("nan"), float("inf")


class Block(nn.Module):
    """Takes its input by a keyword, and returns a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(2)

    def forward(self, *, rows: torch.Tensor) -> dict[str, Any]:
        return {"rows": [self.norm(self.inner(rows)), 3]}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(2, 1)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for block in self.encoder:
            rows = block(rows=rows)["rows"][0]
        out: torch.Tensor = self.head(rows)
        return out


class DistributedDataParallel(nn.Module):
    """Holds a module as the wrapper of that name does, which needs several processes."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.add_module(PARALLEL, module)

    def forward(self, *inputs: Any) -> Any:
        return self.module(*inputs)


@pytest.fixture
def model() -> Iterator[Model]:
    torch.manual_seed(0)
    found = Model()
    yield found
    assert not any(module._forward_hooks for module in found.modules())


def spoil(parameter: torch.Tensor, value: float = NAN) -> None:
    with torch.no_grad():
        parameter.view(-1)[0] = value


def test_the_first_module_with_a_bad_output_is_the_innermost_and_its_weights_are_looked_at(
    model: Model,
) -> None:
    spoil(model.encoder[1].inner.weight, INFINITY)  # type: ignore[union-attr, arg-type]

    with StepWatch({"counters": {}, "model": model}) as watch:
        model(torch.ones(3, 2))

    assert watch.found is not None
    assert (watch.found.module, watch.found.class_name) == ("model.encoder.1.inner", "Linear")
    assert (watch.found.are_inputs_finite, watch.found.are_weights_finite) == (True, False)


def test_an_input_that_is_bad_already_is_told_also_where_it_is_a_keyword(model: Model) -> None:
    with StepWatch({"model": model}) as watch:
        model(torch.tensor([[1.0, 2.0], [NAN, 1.0]]))

    assert watch.found is not None
    assert watch.found.module == "model.encoder.0.inner"
    assert (watch.found.are_inputs_finite, watch.found.are_weights_finite) == (False, True)


def test_a_forward_pass_with_finite_outputs_leaves_nothing(model: Model) -> None:
    with StepWatch({"model": model}) as watch:
        model(torch.ones(3, 2))

    assert watch.found is None


@pytest.mark.parametrize(
    "is_compiled", [False, pytest.param(True, marks=pytest.mark.chaos)], ids=["eager", "compiled"]
)
def test_names_are_those_without_wrappers_and_compiled_code_is_looked_into(
    model: Model, is_compiled: bool
) -> None:
    inner: Any = torch.compile(model, backend="eager") if is_compiled else model
    inner(torch.ones(3, 2))
    spoil(model.head.bias)
    wrapped = DistributedDataParallel(inner)

    with StepWatch({"model": wrapped}) as watch:
        wrapped(torch.ones(3, 2))

    assert watch.found is not None
    assert watch.found.module == "model.head"


def test_hooks_are_removed_also_where_the_step_raises(model: Model) -> None:
    with pytest.raises(ZeroDivisionError), StepWatch({"model": model}):
        assert model.head._forward_hooks
        raise ZeroDivisionError
    assert not model.head._forward_hooks


def test_tensors_that_are_not_finite_are_named_and_gradients_after_them(model: Model) -> None:
    assert bad_tensors({"model": model, "tied": model.head}) == []
    model(torch.ones(3, 2)).sum().backward()
    assert model.head.bias.grad is not None
    spoil(model.head.bias.grad)
    spoil(model.encoder[0].norm.running_var)  # type: ignore[union-attr, arg-type]
    spoil(model.head.weight)

    assert bad_tensors({"model": DistributedDataParallel(model)}) == [
        "model.encoder.0.norm.running_var",
        "model.head.weight",
        "the gradient of model.head.bias",
    ]


class Masking(nn.Module):
    """Gives out -inf in places, as attention with a mask does."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.tensor([0.0, -INFINITY]))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        masked: torch.Tensor = rows + self.mask
        return masked


def masked(*, highest: float = 0.0) -> nn.Sequential:
    """Return a model with a mask; of one with another `highest` even the mask itself is unusual."""
    made = nn.Sequential(nn.Linear(2, 2), Masking(), nn.Softmax(-1), nn.Linear(2, 1))
    made[1].mask[0] = highest  # type: ignore[index, operator]
    return made


def test_a_mask_is_not_blamed(model: Model) -> None:
    made = masked()
    assert bad_tensors({"model": made}) == []

    with StepWatch({"model": made}) as watch:
        made(torch.ones(3, 2))
    assert watch.found is None

    spoil(made[3].weight)  # type: ignore[arg-type]
    with StepWatch({"model": made}) as watch:
        made(torch.ones(3, 2))
    assert watch.found is not None
    assert (watch.found.module, watch.found.are_weights_finite) == ("model.3", False)


def test_what_was_so_in_a_good_step_counts_for_nothing_and_what_is_new_does() -> None:
    made = masked(highest=INFINITY)
    parts = {"model": made}
    usual = bad_tensors(parts)
    assert usual == ["model.1.mask"]
    with StepWatch(parts, usual) as before:
        # Both infinities are usual in its output, and NaN in what follows.
        made[1](torch.ones(3, 2))
    assert before.found is not None

    with StepWatch(parts, usual, before) as watch:
        made[1](torch.ones(3, 2))
    assert watch.found is None

    with StepWatch(parts, usual, before) as watch:
        made[1](torch.full((3, 2), NAN))
    assert watch.found is not None
    assert (watch.found.module, watch.found.are_inputs_finite) == ("model.1", False)
    assert watch.found.are_weights_finite


def test_gradients_are_seen_also_if_they_are_gone_by_the_end_of_the_step(model: Model) -> None:
    tied = nn.ModuleDict({"a": model, "lazy": nn.LazyLinear(2)})
    with StepWatch({"model": tied}) as watch:
        (model(torch.ones(3, 2)).sum() * 1e30).backward()
        model.zero_grad()

    # None of its numbers overflows, and its norm does.
    assert "the gradient of model.a.head.weight" in watch.gradients
    assert bad_tensors({"model": tied}) == []

    with StepWatch({"model": tied}, watch.gradients) as again:
        (model(torch.ones(3, 2)).sum() * 1e30).backward()
    assert again.gradients == []
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_modules_that_cannot_be_looked_into_are_passed_over() -> None:
    class Mapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 1)

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            mapped: torch.Tensor = torch.func.vmap(self.inner)(rows)
            return mapped

    made = nn.Sequential(torch.jit.script(nn.Linear(2, 1)), Mapped())

    with StepWatch({"model": made}) as watch:
        made[1](torch.full((3, 2), NAN))

    assert watch.found is not None
    assert watch.found.module == "model.1"


def test_samples_are_found_by_their_rows_in_whatever_holds_the_batch() -> None:
    images, labels = torch.zeros(4, 2, 2), torch.tensor([1, 2, 3, 4])
    images[2, 1, 1] = NAN
    weights = torch.tensor([1.0, INFINITY, 1.0, 1.0])

    assert bad_rows(({"images": images}, [labels, weights], "name"), 4) == [1, 2]
    assert bad_rows(images[:2], 4) == []


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (torch.tensor([1, 2]), True),
        (torch.empty(0), True),
        (torch.tensor(complex(NAN, 1.0)), False),
        (torch.tensor([1.0, NAN]).to(torch.float8_e4m3fn), False),
        (torch.eye(2).to_sparse(), True),
        ((torch.eye(2) / 0).to_sparse(), False),
        (torch.empty(3, device="meta"), True),
        (nn.LazyLinear(2).weight, True),
        (torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged), True),
        ([{"a": (torch.ones(1), torch.full((1,), -INFINITY, dtype=torch.bfloat16))}], False),
    ],
)
def test_numbers_of_every_kind_are_looked_at(value: Any, expected: bool) -> None:
    assert is_finite(value) is expected
