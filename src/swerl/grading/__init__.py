"""From a patch to a Grade. Read `flow.py` first: the steps that all `graders/` share."""
