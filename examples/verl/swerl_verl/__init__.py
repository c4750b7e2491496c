"""swerl's Episodes as an agent loop of verl."""
