"""Reinforcement learning for language models with adaptive speculative rollouts."""

__version__ = "0.1.0"
