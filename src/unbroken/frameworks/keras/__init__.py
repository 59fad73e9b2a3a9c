"""The parts of Keras: how each is captured and restored."""
