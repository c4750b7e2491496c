"""Checks that a user runs on the machine, the sandboxes, the grading, the agents and the tasks.

One file or folder per command: `doctor`, `launch` (of a recipe), `vet`, `smoke`, …
"""
