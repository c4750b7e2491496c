"""From graded Groups to new weights."""
