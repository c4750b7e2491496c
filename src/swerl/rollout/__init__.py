"""From a Task to a graded Episode."""
