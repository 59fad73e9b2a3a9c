"""The report of a run: what its journals tell, as one page that needs nothing else."""
