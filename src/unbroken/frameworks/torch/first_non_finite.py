"""Where numbers are not finite: the first module of a step, tensors of the parts, rows of a batch.

Some belong there: masks are made of -inf. So it counts what is not usual.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from itertools import chain
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from unbroken.frameworks.bad_output import BadOutput, gradient_of
from unbroken.frameworks.torch.module_names import dotted
from unbroken.frameworks.torch.wrappers import places_of

_EIGHT_BITS = 1
_NONE = frozenset[str]()
_MASK = frozenset({"-inf"})


class StepWatch:
    """Looks on as the modules in `parts` train inside its block.

        with StepWatch({"model": model}, usual) as watch:
            step(batch)

    Then `found` is the first output that was not finite, and `gradients` are the names of those that were
    not, also if they are gone by now. `usual` are the tensors that `bad_tensors` has named while all was
    well, and `before` has looked on at a step that was: what was so in it counts for nothing. Without that
    outputs may be -inf in places. With `runs_eagerly` it looks into compiled code, by running it as it is
    written; otherwise it sees nothing of that, and changes nothing.
    """

    def __init__(
        self,
        parts: Mapping[str, object],
        usual: Collection[str] = (),
        before: StepWatch | None = None,
        *,
        runs_eagerly: bool = True,
    ) -> None:
        self.found: BadOutput | None = None
        self.gradients: list[str] = []
        self._parts, self._before, self._runs_eagerly = parts, before, runs_eagerly
        self._usual_names = frozenset(usual)
        self._usual = {id(tensor) for name, tensor in _leaves(parts) if name in self._usual_names}
        # What was in the inputs and the outputs of each module.
        self._inputs: dict[str, frozenset[str]] = {}
        self._outputs: dict[str, frozenset[str]] = {}

    def __enter__(self) -> Self:
        with ExitStack() as undo:
            if self._runs_eagerly and "torch._dynamo" in sys.modules:
                # What is compiled runs past hooks. Without that module, which is large, nothing is.
                undo.enter_context(torch.compiler.set_stance("force_eager"))
            for name, module in _modules(self._parts):
                # Those that were scripted take no hooks.
                if not isinstance(module, torch.jit.ScriptModule):
                    hook = partial(self._look, name)
                    undo.enter_context(module.register_forward_hook(hook, with_kwargs=True))
            for name, tensor in _leaves(self._parts):
                if tensor.is_leaf and tensor.requires_grad and not is_lazy(tensor):
                    look = partial(self._look_at_gradient, name)
                    undo.enter_context(tensor.register_post_accumulate_grad_hook(look))  # type: ignore[no-untyped-call]
            self._undo = undo.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._undo.close()

    def _look(self, name: str, module: nn.Module, inputs: Any, keywords: Any, output: Any) -> None:
        try:
            given, made = _kinds((inputs, keywords)), _kinds(output)
        except RuntimeError:
            # Inside a transform such as vmap tensors cannot be looked at.
            return
        # Inner modules end first, so that the first one seen is the innermost.
        if self.found is None and made - self._usual_outputs(name):
            self.found = BadOutput(
                module=name,
                class_name=type(module).__name__,
                are_inputs_finite=not given - self._usual_inputs(name),
                are_weights_finite=not any(
                    _is_bad(tensor) and id(tensor) not in self._usual
                    for tensor in (*module.parameters(), *module.buffers())
                ),
            )
        self._inputs[name] = self._inputs.get(name, _NONE) | given
        self._outputs[name] = self._outputs.get(name, _NONE) | made

    def _look_at_gradient(self, name: str, parameter: torch.Tensor) -> None:
        called = gradient_of(name)
        if (
            called not in self._usual_names
            and called not in self.gradients
            and not _is_measurable(parameter.grad)
        ):
            self.gradients.append(called)

    def _usual_inputs(self, name: str) -> frozenset[str]:
        return _NONE if self._before is None else self._before._inputs.get(name, _NONE)

    def _usual_outputs(self, name: str) -> frozenset[str]:
        return _MASK if self._before is None else self._before._outputs.get(name, _MASK)


def bad_tensors(parts: Mapping[str, object]) -> list[str]:
    """Return the names of the parameters, buffers and gradients in modules that are not finite.

    What nothing trains may be -inf in places.
    """
    found, gradients = [], []
    for name, tensor in _leaves(parts):
        if _is_bad(tensor):
            found.append(name)
        if tensor.is_leaf and not is_finite(tensor.grad):
            gradients.append(gradient_of(name))
    return found + gradients


def bad_rows(batch: Any, size: int) -> list[int]:
    """Return the places in `batch` of those of its `size` samples whose numbers are not finite."""
    found: set[int] = set()
    for tensor in _tensors(batch):
        if tensor.layout is torch.strided and tensor.ndim and tensor.shape[0] == size:
            is_bad = ~torch.isfinite(_comparable(tensor.detach())).reshape(size, -1).all(1)
            found.update(is_bad.nonzero().flatten().tolist())
    return sorted(found)


def is_finite(value: Any) -> bool:
    """Tell whether all tensors in `value`, and in the containers in it, are finite."""
    with torch.no_grad():
        return all(bool(torch.isfinite(_comparable(tensor)).all()) for tensor in _tensors(value))


def may_vary() -> bool:
    """Tell whether a device is in use whose kernels may give other bits each time."""
    is_in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return is_in_use and not torch.are_deterministic_algorithms_enabled()


def _modules(parts: Mapping[str, object]) -> Iterator[tuple[str, nn.Module]]:
    """Yield each module in `parts` once, but for those that wrap another, with its path from the part on."""
    met: set[int] = set()
    for part, value in parts.items():
        for place in places_of(value) if isinstance(value, nn.Module) else ():
            if not place.is_wrapper and id(place.module) not in met:
                met.add(id(place.module))
                yield dotted(part, place.name), place.module


def _leaves(parts: Mapping[str, object]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters and buffers of the modules in `parts`, each once, with their names."""
    met: set[int] = set()
    for name, module in _modules(parts):
        for leaf, tensor in chain(
            module.named_parameters(recurse=False), module.named_buffers(recurse=False)
        ):
            if id(tensor) not in met:
                met.add(id(tensor))
                yield dotted(name, leaf), tensor


def _is_bad(tensor: torch.Tensor) -> bool:
    return bool(_kinds(tensor) - (_NONE if tensor.requires_grad else _MASK))


def _is_measurable(gradient: torch.Tensor | None) -> bool:
    """Tell whether a gradient has a norm that is finite; that may overflow where no number does."""
    return all(bool(torch.linalg.vector_norm(tensor).isfinite()) for tensor in _tensors(gradient))


def _kinds(value: Any) -> frozenset[str]:
    """Return which of "nan", "inf" and "-inf" are in the tensors in `value`."""
    found: set[str] = set()
    for tensor in _tensors(value):
        if not is_finite(tensor):
            numbers = _comparable(tensor.detach())
            numbers = torch.view_as_real(numbers.resolve_conj()) if numbers.is_complex() else numbers
            there = (("nan", numbers.isnan()), ("inf", numbers.isposinf()), ("-inf", numbers.isneginf()))
            found.update(kind for kind, places in there if bool(places.any()))
    return frozenset(found)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield what holds numbers that may be not finite."""
    if isinstance(value, torch.Tensor):
        has_no_numbers = value.is_meta or is_lazy(value)
        is_exact = not (value.is_floating_point() or value.is_complex())
        if has_no_numbers or is_exact or value.is_quantized or value.is_nested:
            return
        if value.layout is torch.sparse_coo:
            yield value._values()
        elif value.layout is torch.strided:
            yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _comparable(tensor: torch.Tensor) -> torch.Tensor:
    # Of floats of 8 bits torch does not tell.
    return tensor.float() if tensor.element_size() == _EIGHT_BITS else tensor
