"""The run folder and everything in it. Read `layout.py` first."""
