"""model.fit of Keras as a run."""
