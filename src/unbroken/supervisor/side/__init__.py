"""What goes on beside a run: its output, notifications, the process that sends them, the ballast."""
