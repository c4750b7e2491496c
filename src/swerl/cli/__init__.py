"""The command line: the only room that prints. `main.py` lists the commands."""
