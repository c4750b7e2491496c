"""Simulate a run in discrete events, before it starts."""
