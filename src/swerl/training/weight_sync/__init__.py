"""Send weights from the trainer into running engines."""
