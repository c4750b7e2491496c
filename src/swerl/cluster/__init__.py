"""The machines of a run: processes on them, and checks of their fitness."""
