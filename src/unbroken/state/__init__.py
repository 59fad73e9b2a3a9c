"""The state of a run as plain values: host tensors, trees of leaves, handlers. No framework, no pickle."""
