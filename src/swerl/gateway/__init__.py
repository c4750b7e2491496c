"""The HTTP service between agents and engines that records exact tokens."""
