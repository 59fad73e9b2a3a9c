"""Committed, immutable states on a storage: format, writing, reading, verification, retention."""
