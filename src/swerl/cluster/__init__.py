"""The machines of a run: starting processes on them, and looking whether they are fit for it."""
