"""For the tests of TensorFlow: no seed that another test has set."""

from __future__ import annotations

import pytest

from .. import quiet_tensorflow
from ..supervisor.conftest import bench

__all__ = ["bench"]


@pytest.fixture(autouse=True)
def _no_seed() -> None:
    quiet_tensorflow.tf.random.set_seed(None)
