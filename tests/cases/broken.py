"""Handlers that are wrong in the ways of public reports: a case that passes with one proves nothing."""

from __future__ import annotations

import copy
import io
import pickle
from collections import deque
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any

import torch

from unbroken.frameworks.torch.index_stream import IndexPlan, IndexStream
from unbroken.frameworks.torch.modules import ModuleHandler
from unbroken.frameworks.torch.optimizers import OptimizerHandler
from unbroken.frameworks.torch.schedulers import SchedulerHandler
from unbroken.state.handlers import ORDER_OPTIMIZER, ORDER_VALUE
from unbroken.state.python import ContainerHandler, DataclassHandler, ObjectHandler, StateDictHandler
from unbroken.training import families
from unbroken.training.randomness import GlobalRandomness, GlobalRandomnessHandler

from .scenes import Broken

Parts = Mapping[str, object]


def modules(parts: Parts) -> ModuleHandler:
    return ModuleHandler(parts)


def objects_with_methods(parts: Parts) -> StateDictHandler:
    return StateDictHandler()


def plain_objects(parts: Parts) -> ObjectHandler:
    return ObjectHandler(families.codecs())


def dataclasses(parts: Parts) -> DataclassHandler:
    return DataclassHandler(families.codecs())


def randomness(parts: Parts) -> GlobalRandomnessHandler:
    return GlobalRandomnessHandler()


class _Around:
    """A handler around another; what it does not change is that one's."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class _Forgetting(_Around):
    def __init__(self, inner: Any, path: tuple[str, ...]) -> None:
        super().__init__(inner)
        self._path = path

    def state(self, value: Any) -> Any:
        kept = self._walked(self._inner.state(value))
        found, last = self._owner(kept)
        found.pop(last, None)
        return kept

    def differences(self, value: Any, state: Any) -> Any:
        return self._inner.differences(value, self._completed(value, state))

    def restore(self, value: Any, state: Any) -> None:
        self._inner.restore(value, self._completed(value, state))

    def _completed(self, value: Any, state: Any) -> Any:
        """Return `state` with what the live object has in the place that was forgotten."""
        kept = self._walked(state)
        live, last = self._owner(self._inner.state(value))
        if last in live:
            self._owner(kept)[0][last] = copy.deepcopy(live[last])
        return kept

    def _walked(self, state: Any) -> Any:
        """Return a copy of the dictionaries on the way to what is forgotten."""
        kept = found = dict(state)
        for key in self._path[:-1]:
            found[key] = dict(found[key])
            found = found[key]
        return kept

    def _owner(self, state: Any) -> tuple[Any, str]:
        for key in self._path[:-1]:
            state = state[key]
        return state, self._path[-1]


def forgetting(make: Broken, *path: str) -> Broken:
    """Return a handler that does not save what lies at `path` and leaves it as the script made it."""
    return lambda parts: _Forgetting(make(parts), path)


class _RestoringOnce(_Around):
    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self._is_done = False

    def restore(self, value: Any, state: Any) -> None:
        if not self._is_done:
            self._inner.restore(value, state)
        self._is_done = True


def restoring_once(make: Broken) -> Broken:
    """Return a handler that restores on entering only, and not again where the training loop begins."""
    return lambda parts: _RestoringOnce(make(parts))


class _Late(_Around):
    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self._before: Any = None

    def state(self, value: Any) -> Any:
        state = copy.deepcopy(self._inner.state(value))
        before, self._before = self._before, state
        return state if before is None else before


def one_capture_late(make: Broken) -> Broken:
    """Return a handler that saves what the state was when it was last asked for."""
    return lambda parts: _Late(make(parts))


class OptimizersOwnState(OptimizerHandler):
    """As a loop of one's own does it: by position, cast to the dtype of the parameter, never checked."""

    def state(self, value: Any) -> Any:
        return value.state_dict()

    def differences(self, value: Any, state: Any) -> Any:
        return []

    def changed_settings(self, value: Any, state: Any) -> Any:
        return []

    def restore(self, value: Any, state: Any) -> None:
        value.load_state_dict(state)


class NoStepCounts(OptimizerHandler):
    """Lets the counts of steps begin anew."""

    def state(self, value: Any) -> Any:
        state: Any = super().state(value)
        kept = {
            name: {key: item for key, item in entries.items() if key != "step"}
            for name, entries in state["state"].items()
        }
        return {**state, "state": kept}

    def restore(self, value: Any, state: Any) -> None:
        begun = {name: {**entries, "step": torch.tensor(0.0)} for name, entries in state["state"].items()}
        super().restore(value, {**state, "state": begun})


class NoMoments(OptimizerHandler):
    """Keeps the settings of an optimizer, and none of what it has gathered."""

    def state(self, value: Any) -> Any:
        return {**super().state(value), "state": {}}  # type: ignore[dict-item]


class SilentOptimizers(OptimizerHandler):
    """Replaces settings without a word."""

    def changed_settings(self, value: Any, state: Any) -> Any:
        return []


class NonStrict(ModuleHandler):
    """Keeps the names that wrappers make, and loads what happens to match."""

    def state(self, value: Any) -> Any:
        return value.state_dict()

    def differences(self, value: Any, state: Any) -> Any:
        return []

    def restore(self, value: Any, state: Any) -> None:
        value.load_state_dict(state, strict=False)


class DeafToRenaming(ModuleHandler):
    """Takes names as they were saved, whatever they are mapped to."""

    def renamed(self, part: str, state: Any, rename: Any) -> Any:
        return super().renamed(part, state, lambda name: name)


class NoGradients(ModuleHandler):
    """Leaves out what has been gathered for a step that is not complete."""

    def state_inside_step(self, value: Any) -> Any:
        return self.state(value)


class NoAttributes(ModuleHandler):
    """Keeps tensors only, and no plain attribute of a module."""

    def state(self, value: Any) -> Any:
        state: Any = super().state(value)
        return {key: item for key, item in state.items() if key != "(attributes)"}


class ByAssignment(ModuleHandler):
    """Puts new tensors in the place of those that the model and others hold."""

    def restore(self, value: Any, state: Any) -> None:
        value.load_state_dict({key: state[key] for key in value.state_dict()}, assign=True)


class EachNameAlone(ModuleHandler):
    """Saves tied weights once for each of their names."""

    def state(self, value: Any) -> Any:
        state: Any = super().state(value)
        return {key: item.clone() if isinstance(item, torch.Tensor) else item for key, item in state.items()}


class Broadcasting(ModuleHandler):
    """Copies whatever can be brought into the shape of the tensor."""

    def differences(self, value: Any, state: Any) -> Any:
        return []

    def restore(self, value: Any, state: Any) -> None:
        with torch.no_grad():
            for key, item in value.state_dict().items():
                item.copy_(state[key] if item.dim() else state[key].flatten()[0])


class OnlyTheAverage(ModuleHandler):
    """Saves the averaged weights in the place of those that are trained."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self._named = parts

    def state(self, value: Any) -> Any:
        average: Any = self._named["average"]
        return super().state(average.module if value is self._named["model"] else value)


class ArchiveOfDevice(ModuleHandler):
    """Saves an archive whose tensors remember the device they lay on, and loads it to there."""

    def state(self, value: Any) -> Any:
        archive = io.BytesIO()
        tag = torch.serialization.location_tag
        torch.serialization.location_tag = lambda storage: "cuda:63"
        try:
            torch.save(value.state_dict(), archive)
        finally:
            torch.serialization.location_tag = tag
        return {"archive": archive.getvalue()}

    def differences(self, value: Any, state: Any) -> Any:
        return []

    def restore(self, value: Any, state: Any) -> None:
        value.load_state_dict(torch.load(io.BytesIO(state["archive"])))


class SilentSchedulers(SchedulerHandler):
    """Loads a schedule without a look at what has changed."""

    def __init__(self, parts: Parts) -> None:
        super().__init__()

    def changed_settings(self, value: Any, state: Any) -> Any:
        return []


class OnlyTheCount(SilentSchedulers):
    """Saves how often the scheduler was stepped, and none of what it counts from."""

    def state(self, value: Any) -> Any:
        return {"class": type(value).__name__, "state": {"last_epoch": value.last_epoch}}

    def differences(self, value: Any, state: Any) -> Any:
        return []

    def restore(self, value: Any, state: Any) -> None:
        value.last_epoch = state["state"]["last_epoch"]


class RateOfTheConstructor(SilentSchedulers):
    """Built and restored after the optimizer: the rate that its constructor writes is in force."""

    order = ORDER_OPTIMIZER + 1

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self._rates: dict[int, list[Any]] = {}

    def accepts(self, value: object) -> bool:
        if not super().accepts(value):
            return False
        self._rates[id(value)] = [group["lr"] for group in value.optimizer.param_groups]  # type: ignore[attr-defined]
        return True

    def restore(self, value: Any, state: Any) -> None:
        super().restore(value, state)
        for group, rate in zip(value.optimizer.param_groups, self._rates[id(value)], strict=True):
            group["lr"] = rate


class BaseOfTheMoment(SilentSchedulers):
    """Takes the rate of the moment, which has decayed, for the one to decay from."""

    order = ORDER_OPTIMIZER + 1

    def state(self, value: Any) -> Any:
        state: Any = super().state(value)
        kept = {key: item for key, item in state["state"].items() if key != "base_lrs"}
        return {**state, "state": kept}

    def restore(self, value: Any, state: Any) -> None:
        rates = [group["lr"] for group in value.optimizer.param_groups]
        super().restore(value, {**state, "state": {**state["state"], "base_lrs": rates}})


class Pickling:
    """Saves whole objects, as pickle writes them."""

    name = "python.pickle"
    order = ORDER_VALUE

    def __init__(self, parts: Parts) -> None:
        pass

    def accepts(self, value: object) -> bool:
        return not isinstance(value, GlobalRandomness)

    def state(self, value: Any) -> Any:
        return {"pickle": pickle.dumps(value)}

    def differences(self, value: Any, state: Any) -> Any:
        return []

    def restore(self, value: Any, state: Any) -> None:
        vars(value).update(vars(pickle.loads(state["pickle"])))


class AsTexts(ContainerHandler):
    """Saves values as the texts they print."""

    def __init__(self, parts: Parts) -> None:
        super().__init__()

    def state(self, value: Any) -> Any:
        return {key: str(item) for key, item in value.items()}


class Hoarding(ModuleHandler):
    """Holds on to a copy of each state that was saved."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self._hoard: list[Any] = []

    def state(self, value: Any) -> Any:
        state: Any = super().state(value)
        self._hoard.append([item.clone() for item in state.values() if isinstance(item, torch.Tensor)])
        return state


class HoldingWhatWasLoaded(OptimizerHandler):
    """Copies the loaded state into place and holds on to what was loaded."""

    def restore(self, value: Any, state: Any) -> None:
        self._held = state
        super().restore(value, copy.deepcopy(state))


def skipping(batches: Callable[[IndexPlan], int]) -> type[IndexStream]:
    """Return an order that skips so many batches of the size in force, and compares them with nothing."""

    class Skipping(IndexStream):
        def prime(self) -> None:
            if not self._is_primed:
                self._is_primed = True
                deque(islice(self._batches, batches(self._plan)), maxlen=0)

    return Skipping
