"""The watch over training: whether its numbers are well, and what is done where they are not."""
