"""The parts of TensorFlow: how each is captured and restored."""
