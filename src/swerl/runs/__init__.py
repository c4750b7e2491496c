"""The run folder and everything in it."""
