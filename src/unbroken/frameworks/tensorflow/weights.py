"""The weights of a tf.Module by name, for a warm start."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from unbroken.frameworks.dtypes import numpy_dtype
from unbroken.frameworks.tensorflow.content import content_of
from unbroken.frameworks.tensorflow.distributed import assign_value
from unbroken.frameworks.tensorflow.object_graph import names_in_graph
from unbroken.frameworks.tensorflow.tensors import TfTensor
from unbroken.frameworks.weight_differences import weight_differences
from unbroken.interchange.tf_bundle import TfBundle
from unbroken.interchange.tf_graph import ObjectGraph
from unbroken.state.handlers import Difference
from unbroken.state.tensors import LoadedTensor


class TensorFlowWeights:
    """The variables below a module, by their places: attributes, keys and numbers of items."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self.tensors: dict[str, Any] = dict(content_of(module).variables)

    def made_of(self, tensor: LoadedTensor) -> np.ndarray[Any, Any]:
        """Return the array with the bytes of a tensor that was read."""
        return np.frombuffer(tensor.data, dtype=numpy_dtype(tensor.dtype)).reshape(tensor.shape)

    def names_in_graph(self, bundle: TfBundle, graph: ObjectGraph, node: int) -> Mapping[str, str]:
        """Return the names of weights by the keys of a checkpoint in which object `node` is this module."""
        return names_in_graph(self._module, self.tensors, bundle, graph, node)

    def differences(self, found: Mapping[str, np.ndarray[Any, Any]]) -> list[Difference]:
        """Return how `found` differs from these in names, shapes and dtypes."""
        return weight_differences(self.tensors, found, lambda live: (TfTensor(live).shape, live.dtype.name))

    def fill(self, found: Mapping[str, np.ndarray[Any, Any]]) -> None:
        """Copy `found` into the variables of the same names, in place, cast to their dtype."""
        for name, array in found.items():
            variable = self.tensors[name]
            assign_value(variable, array.astype(variable.dtype.as_numpy_dtype, copy=False))
