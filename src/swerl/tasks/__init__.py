"""Task files: made, vetted, chosen."""
