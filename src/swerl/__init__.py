"""Reinforcement learning of coding agents, from a public dataset to a trained checkpoint."""

__version__ = "0.1.0"
