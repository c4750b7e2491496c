"""Engines; the file name is `engine.type`."""
