"""What a run uses, how fast it is, and what is to come."""
