"""Checks that a user runs: the machine, the sandboxes, the grading, the agents, the tasks."""
