"""Attack a sandbox, and report which attacks worked."""
