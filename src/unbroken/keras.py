"""What makes `model.fit` of Keras unbroken."""

from unbroken.integrations.keras.checkpoint import Checkpoint

__all__ = ["Checkpoint"]
