"""Task files: read, converted, selected, exported; the twin's tasks.

`convert.py` makes Tasks from rows; `hide_future.py` removes later commits from a sandbox.
"""
