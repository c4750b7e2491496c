"""Coding agents; the file name is `harness.type`."""
