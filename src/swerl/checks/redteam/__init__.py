"""Cheating policies, run through whole Episodes to see that none of them is rewarded."""
