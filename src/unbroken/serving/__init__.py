"""In a process that serves a model: the newest good weights of a run that is still training."""
