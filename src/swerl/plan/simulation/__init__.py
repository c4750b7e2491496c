"""A run in discrete events: how long it takes and what it waits for, before it starts."""
