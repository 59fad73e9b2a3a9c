"""All that the run needs from Keras, in one place."""

from __future__ import annotations

from unbroken.frameworks.family import Family


class KerasFamily(Family):
    """Keras, on whichever framework is below it."""


FAMILY = KerasFamily()
