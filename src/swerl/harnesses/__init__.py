"""Coding agents; the file name is `harness.type`. Read `builtin.py` first: the smallest one."""
