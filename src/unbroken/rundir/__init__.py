"""The run directory: file names, journal, heartbeat, lock. Where the two sides meet."""
