"""Memory, disk, cost and time of a run, computed before it starts. Read `plan.py` first."""
