"""Checks that a user runs on the machine, the sandboxes, the grading, the agents and the tasks.

One file or folder per command: `doctor`, `preflight`, `vet`, `smoke`, …
"""
