"""Keeps a run going: starts attempts, says why each ended, decides what comes next."""
