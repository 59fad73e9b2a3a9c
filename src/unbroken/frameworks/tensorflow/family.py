"""All that the run needs from TensorFlow, in one place."""

from __future__ import annotations

from unbroken.frameworks.family import Family


class TensorFlowFamily(Family):
    """TensorFlow."""


FAMILY = TensorFlowFamily()
