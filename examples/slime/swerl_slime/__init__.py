"""swerl's agents, sandboxes and grading as the rollouts of a slime run."""
