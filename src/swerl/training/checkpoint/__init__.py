"""Checkpoints: written while training goes on, read under any layout."""
