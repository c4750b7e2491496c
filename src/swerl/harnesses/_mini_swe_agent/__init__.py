"""Insides of the `mini-swe-agent` harness."""
