"""From a Task to a graded Episode. Read `run` in `episode.py` first; `wiring.py` builds parts."""
