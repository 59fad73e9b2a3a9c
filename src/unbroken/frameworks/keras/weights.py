"""The weights of a model by name, for a warm start."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

from unbroken.errors import UsageError
from unbroken.frameworks.keras.adapted import use_filled_statistics
from unbroken.frameworks.keras.structure import named_variables
from unbroken.frameworks.keras.tensors import array_of, fill_with
from unbroken.frameworks.keras.unbuilt import refuse_unbuilt
from unbroken.frameworks.keras.weight_files import paths_in_file
from unbroken.frameworks.weight_differences import weight_differences
from unbroken.interchange.tf_bundle import TfBundle
from unbroken.interchange.tf_graph import ObjectGraph
from unbroken.state.handlers import Difference
from unbroken.state.tensors import LoadedTensor


class KerasWeights:
    """The weights of a model or layer, without the states of its seed generators.

    Raises UnsupportedStateError for one that has not been built: it has no weights yet.
    """

    def __init__(self, model: keras.Layer) -> None:
        refuse_unbuilt(model, "")
        self._model = model
        self.tensors: dict[str, Any] = {
            item.name: item.variable for item in named_variables(model) if item.is_weight
        }

    def names_in_file(self) -> Mapping[str, str]:
        """Return the names of weights by their paths in a `.weights.h5`, such as `layers/dense_1/vars/0`."""
        paths = paths_in_file(self._model)
        return {path: name for name, variable in self.tensors.items() for path in paths.get(id(variable), ())}

    def names_in_graph(self, bundle: TfBundle, graph: ObjectGraph, node: int) -> Mapping[str, str]:
        """Return the names of weights by the keys of a checkpoint in which object `node` is this model."""
        if keras.config.backend() != "tensorflow":
            return {}
        from unbroken.frameworks.tensorflow.object_graph import names_in_graph

        return names_in_graph(self._model, self.tensors, bundle, graph, node)

    def made_of(self, tensor: Any) -> np.ndarray[Any, Any]:
        """Return the array with the bytes of a tensor that was read, independent of them."""
        if isinstance(tensor, np.ndarray):
            return tensor
        if not isinstance(getattr(tensor, "data", None), memoryview):
            raise UsageError(
                f"expected weights of Keras, found a {type(tensor).__module__}.{type(tensor).__qualname__}",
                hint="convert the file to safetensors first",
            )
        loaded: LoadedTensor = tensor
        return array_of(loaded).copy()

    def differences(self, found: Mapping[str, np.ndarray[Any, Any]]) -> list[Difference]:
        """Return how `found` differs from these in names, shapes and dtypes."""
        return weight_differences(self.tensors, found, lambda live: (tuple(live.shape), live.dtype))

    def fill(self, found: Mapping[str, np.ndarray[Any, Any]]) -> None:
        """Copy `found` into the variables of the same names, in place, cast to their dtype."""
        for name, array in found.items():
            fill_with(self.tensors[name], array)
        use_filled_statistics(self._model)
