"""Failures rehearsed with a toy job: each hurts it for real, and says whether it came through."""
