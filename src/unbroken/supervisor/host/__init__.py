"""Where a run lives: clouds that take machines away, batch systems, systemd, tmux, the next boot."""
