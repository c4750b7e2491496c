"""Reinforcement learning of coding agents, from a public dataset to a trained checkpoint."""
