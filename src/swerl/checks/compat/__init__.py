"""The agent lab: real agents against a scripted model, and what came of it in tokens."""
