"""Insides of the `e2b` sandbox."""
