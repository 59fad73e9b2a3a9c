"""Checkpoints of all kinds, read from their bytes alone: no framework is loaded and no pickle executed."""
