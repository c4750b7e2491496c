"""Graders; the file name is a task's `grader`."""
