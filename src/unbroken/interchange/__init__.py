"""Files of other libraries that both a run and the command line read, without those libraries."""
