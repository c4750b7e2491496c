"""The machines of a run: processes on them, and checks of their fitness.

Read `node.py` first: what a run requires of a machine; `open.py` chooses the launcher.
"""
