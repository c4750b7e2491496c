"""Check grading: cheating policies run through whole Episodes, and none must be rewarded."""
