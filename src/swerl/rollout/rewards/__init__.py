"""The rewards: a module for each, named as users type it."""
