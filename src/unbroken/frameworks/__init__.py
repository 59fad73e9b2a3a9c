"""State handlers and loaders for what users bring: the only place that knows a framework."""
