"""From graded Groups to new weights. Read `run` in `loop.py` first."""
