"""The truth about checkpoints, without a framework: what is in them, and whether it is whole."""
