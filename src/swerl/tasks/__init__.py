"""Task files: read, converted, selected, exported; the twin's tasks."""
