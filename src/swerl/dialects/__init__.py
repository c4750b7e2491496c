"""Chat wire formats."""
