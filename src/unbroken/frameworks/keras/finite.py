"""Where numbers are not finite: the first layer of a step, variables of the parts, rows of a batch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import Any, Self

import keras
import numpy as np

from unbroken.frameworks.bad_output import BadOutput, gradient_of
from unbroken.frameworks.keras.optimizers import variable_names
from unbroken.frameworks.keras.rates import optimizers_of
from unbroken.frameworks.keras.structure import dotted, named_variables, places_of
from unbroken.frameworks.keras.tensors import raw

_DEEPEST = 20


class StepWatch:
    """Looks on as the layers in `parts` train inside its block, and at the gradients that are applied.

    Then `found` is the first output that was not finite, and `gradients` are the names of those that were
    not. `usual` are what `bad_tensors` has named while all was well; a layer whose output was not finite
    `before`, in a step that was well, counts for nothing. With `runs_eagerly` it looks into what is compiled,
    by running it as it is written; otherwise it sees nothing of that, and changes nothing.
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
        self._parts, self._usual, self._runs_eagerly = parts, frozenset(usual), runs_eagerly
        self._usual_layers: frozenset[str] = frozenset() if before is None else frozenset(before._bad)
        self._bad: set[str] = set()

    def __enter__(self) -> Self:
        with ExitStack() as undo:
            if self._runs_eagerly:
                undo.enter_context(_eagerly())
            for name, layer in _layers(self._parts):
                _wrap(undo, layer, "call", partial(self._look, name, layer))
            names = variable_names(self._parts)
            for _, optimizer in optimizers_of(self._parts):
                _wrap(undo, optimizer, "apply", partial(self._look_at_gradients, names, optimizer))
            self._undo = undo.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._undo.close()

    def _look(self, name: str, layer: Any, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        output = call(*args, **kwargs)
        # Inner layers end first, so that the first one seen is the innermost.
        if not _is_finite(output):
            self._bad.add(name)
            if self.found is None and name not in self._usual_layers:
                self.found = BadOutput(
                    module=name,
                    class_name=type(layer).__name__,
                    are_inputs_finite=_is_finite((args, kwargs)),
                    are_weights_finite=all(_is_sound(item.variable) for item in named_variables(layer)),
                )
        return output

    def _look_at_gradients(
        self,
        names: Mapping[int, str],
        optimizer: Any,
        apply: Callable[..., Any],
        grads: Any,
        trainable_variables: Any = None,
    ) -> Any:
        trained = optimizer._trainable_variables if trainable_variables is None else trainable_variables
        for gradient, variable in zip(grads, trained, strict=False):
            name = gradient_of(names.get(id(raw(variable)), variable.name))
            if name not in self._usual and name not in self.gradients and not _is_finite(gradient):
                self.gradients.append(name)
        return apply(grads, trainable_variables)


def _wrap(undo: ExitStack, owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Put `around`, which is given what it is around, in the place of a method of one object."""
    before = {key: item for key, item in vars(owner).items() if key == name}
    vars(owner)[name] = partial(around, getattr(owner, name))

    def put_back() -> None:
        del vars(owner)[name]
        vars(owner).update(before)

    undo.callback(put_back)


def _eagerly() -> ExitStack:
    """Return a context in which functions run as they are written, where the framework below can do so."""
    undo = ExitStack()
    if keras.config.backend() == "tensorflow":
        import tensorflow as tf

        undo.callback(tf.config.run_functions_eagerly, tf.config.functions_run_eagerly())
        tf.config.run_functions_eagerly(True)
    return undo


def bad_tensors(parts: Mapping[str, object]) -> list[str]:
    """Return the names of the variables of models that are not finite; what nothing trains may be -inf."""
    return [
        dotted(part, item.name)
        for part, value in parts.items()
        if isinstance(value, keras.Layer)
        for item in named_variables(value)
        if not _is_sound(item.variable)
    ]


def bad_rows(batch: Any, size: int) -> list[int]:
    """Return the places in `batch` of those of its `size` samples whose numbers are not finite."""
    found: set[int] = set()
    for array in _arrays(batch, 0):
        if array.ndim and array.shape[0] == size:
            is_bad = ~np.isfinite(array).reshape(size, -1).all(axis=1)
            found.update(int(row) for row in is_bad.nonzero()[0])
    return sorted(found)


def _layers(parts: Mapping[str, object]) -> Iterator[tuple[str, Any]]:
    met: set[int] = set()
    for part, value in parts.items():
        for place in places_of(value) if isinstance(value, keras.Layer) else ():
            if id(place.layer) not in met:
                met.add(id(place.layer))
                yield dotted(part, place.name), place.layer


def _is_sound(variable: Any) -> bool:
    for array in _arrays(variable, 0):
        is_good = np.isfinite(array) if variable.trainable else np.isfinite(array) | np.isneginf(array)
        if not is_good.all():
            return False
    return True


def _is_finite(value: Any) -> bool:
    return all(bool(np.isfinite(array).all()) for array in _arrays(value, 0))


def _arrays(value: Any, depth: int) -> Iterator[np.ndarray[Any, Any]]:
    """Yield what holds numbers that may be not finite, as arrays; nothing for tensors without values."""
    if depth > _DEEPEST:
        return
    if isinstance(value, Mapping):
        for item in value.values():
            yield from _arrays(item, depth + 1)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _arrays(item, depth + 1)
    elif isinstance(value, np.ndarray) or (_is_tensor(value) and _has_value(value)):
        array = np.asarray(keras.ops.convert_to_numpy(value))
        if array.dtype.kind in "fc":
            yield array
        elif array.dtype.kind == "V":
            # Dtypes of ml_dtypes, of which NumPy does not tell.
            yield array.astype(np.float32)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, keras.Variable) or bool(keras.ops.is_tensor(value))


def _has_value(value: Any) -> bool:
    if isinstance(value, keras.Variable) or keras.config.backend() != "tensorflow":
        return True
    # Those of a graph that is being traced have none; nor do sparse ones and such.
    return hasattr(value, "_numpy")
