"""Weights from the trainer into running engines."""
