"""Inside the user's process: capture, save, restore, position, stop."""
