"""Several processes that train one model together: what they agree on, and what each adds to a checkpoint."""
