"""Checkpoints: written while training continues, read under any layout."""
