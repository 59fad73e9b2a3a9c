"""Runs that live and make no progress."""
