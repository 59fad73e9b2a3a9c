"""Watches torch at work in a script that knows nothing of it: loaders, modules, losses, optimizers, saves."""

from __future__ import annotations

import functools
import importlib
import io
import os
import sys
import weakref
from collections.abc import Iterator
from typing import Any, Protocol


class Observer(Protocol):
    """Is told what torch does, in the process that observes it and not in workers."""

    def pass_begins(self) -> Any:
        """A loader is about to begin a pass; return what to say of it in `batches_of`."""
        ...

    def batches_of(self, batches: Any, begun: Any) -> None:
        """The pass that was about to begin has these batches."""
        ...

    def fetching(self) -> None:
        """A batch is asked for."""
        ...

    def fetched(self, batches: Any, batch: Any) -> None:
        """It is there."""
        ...

    def exhausted(self, batches: Any) -> None:
        """There is no further batch in the pass."""
        ...

    def calling(self, inputs: Any, *, is_graded: bool) -> None:
        """A trained module is called; `is_graded` tells a step from an evaluation."""
        ...

    def about_to_step(self) -> None: ...

    def stepped(self, optimizer: Any) -> None: ...

    def lost(self, loss: float) -> None:
        """Gradients of this loss are computed."""
        ...

    def dies_in_save(self) -> bool:
        """Tell whether the process is to die with half of what is being saved written."""
        ...

    def die_in_save(self) -> None: ...

    def saving(self, path: str | None) -> None:
        """Something is about to be saved there, or into an open file."""
        ...

    def saved(self) -> None: ...


class Optimizers:
    """The optimizers that the process has made, and the modules that they train."""

    def __init__(self) -> None:
        self._made: list[weakref.ref[Any]] = []
        self._is_trained: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()

    def __iter__(self) -> Iterator[Any]:
        """Yield those that are alive, in the order they were made in."""
        return (optimizer for made in self._made if (optimizer := made()) is not None)

    def add(self, optimizer: Any) -> None:
        self._made.append(weakref.ref(optimizer))
        self._is_trained.clear()

    def train(self, module: Any) -> bool:
        """Tell whether one of them has a parameter of `module`."""
        found = self._is_trained.get(module)
        if found is None:
            theirs = {id(item) for one in self for group in one.param_groups for item in group["params"]}
            found = any(id(parameter) in theirs for parameter in module.parameters())
            self._is_trained[module] = found
        return found

    def steps(self) -> int:
        """Return how many steps they have made by their own counts, where they count."""
        return sum(max((_count(state) for state in one.state.values()), default=0) for one in self)


def watch(observer: Observer, optimizers: Optimizers) -> None:
    """Tell `observer`, from now on, what torch does, and keep `optimizers` complete."""
    torch: Any = sys.modules["torch"]
    for module in ("torch.utils.data", "torch.optim.lr_scheduler"):
        importlib.import_module(module)
    here = os.getpid()

    def is_here() -> bool:
        # Workers that were forked have all of this, too.
        return os.getpid() == here

    _watch_optimizers(torch, observer, optimizers, is_here)
    _watch_modules(torch, observer, optimizers, is_here)
    _watch_loaders(torch, observer, is_here)
    _watch_losses(torch, observer, is_here)
    _watch_saves(torch, observer, is_here)


def _watch_optimizers(torch: Any, observer: Observer, optimizers: Optimizers, is_here: Any) -> None:
    made = torch.optim.Optimizer.__init__

    @functools.wraps(made)
    def make(self: Any, *arguments: Any, **options: Any) -> None:
        made(self, *arguments, **options)
        optimizers.add(self)

    def before(*_: Any) -> None:
        if is_here():
            observer.about_to_step()

    def after(optimizer: Any, *_: Any) -> None:
        if is_here():
            observer.stepped(optimizer)

    torch.optim.Optimizer.__init__ = make
    # By its module: as an attribute of its package torch hides it.
    hooks: Any = importlib.import_module("torch.optim.optimizer")
    hooks.register_optimizer_step_pre_hook(before)
    hooks.register_optimizer_step_post_hook(after)


def _watch_modules(torch: Any, observer: Observer, optimizers: Optimizers, is_here: Any) -> None:
    def before(module: Any, inputs: Any) -> None:
        # The compiler follows hooks, too. It is the call of what it compiles that begins a step.
        if torch.compiler.is_compiling():
            return
        if is_here() and optimizers.train(module):
            observer.calling(inputs, is_graded=torch.is_grad_enabled())

    torch.nn.modules.module.register_module_forward_pre_hook(before)


def _watch_loaders(torch: Any, observer: Observer, is_here: Any) -> None:
    loader_class = torch.utils.data.DataLoader
    batches_class = torch.utils.data.dataloader._BaseDataLoaderIter
    begin, fetch = loader_class.__iter__, batches_class.__next__

    @functools.wraps(begin)
    def iterate(self: Any) -> Any:
        if not is_here():
            return begin(self)
        begun = observer.pass_begins()
        batches = begin(self)
        observer.batches_of(batches, begun)
        return batches

    @functools.wraps(fetch)
    def following(self: Any) -> Any:
        if not is_here():
            return fetch(self)
        observer.fetching()
        try:
            batch = fetch(self)
        except StopIteration:
            observer.exhausted(self)
            raise
        observer.fetched(self, batch)
        return batch

    loader_class.__iter__ = iterate
    batches_class.__next__ = following


def _watch_losses(torch: Any, observer: Observer, is_here: Any) -> None:
    original = torch.Tensor.backward

    @functools.wraps(original)
    def backward(self: Any, *arguments: Any, **options: Any) -> Any:
        if is_here() and self.numel() == 1:
            observer.lost(float(self.detach()))
        return original(self, *arguments, **options)

    torch.Tensor.backward = backward


def _watch_saves(torch: Any, observer: Observer, is_here: Any) -> None:
    original = torch.save

    @functools.wraps(original)
    def save(obj: Any, f: Any, *arguments: Any, **options: Any) -> Any:
        if not is_here():
            return original(obj, f, *arguments, **options)
        observer.saving(os.fsdecode(f) if isinstance(f, str | os.PathLike) else None)
        if observer.dies_in_save():
            whole = io.BytesIO()
            original(obj, whole, *arguments, **options)
            _write_half(whole.getvalue(), f)
            observer.die_in_save()
        result = original(obj, f, *arguments, **options)
        observer.saved()
        return result

    torch.save = save


def _write_half(content: bytes, file: Any) -> None:
    """Leave what a death in the middle of a write leaves."""
    half = content[: len(content) // 2]
    if isinstance(file, str | os.PathLike):
        with open(file, "wb") as target:
            target.write(half)
    else:
        file.write(half)
        file.flush()


def _count(state: Any) -> int:
    step = state.get("step", 0) if isinstance(state, dict) else 0
    return int(step)
