"""Adapters to what people train and look on with. Each is loaded by its own name, with what it adapts."""
