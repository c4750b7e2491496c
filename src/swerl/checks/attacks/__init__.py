"""Attacks on a sandbox of its own, and the sheet of what they met."""
