"""Where bytes live. A storage knows keys and bytes, nothing about checkpoints."""
