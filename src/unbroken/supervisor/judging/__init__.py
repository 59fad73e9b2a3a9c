"""Why an attempt ended: what can be read, and the verdict on it."""
