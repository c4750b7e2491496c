"""Task images: building, storing, mirroring."""
