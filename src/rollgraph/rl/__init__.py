"""Reinforcement learning: prompts, environments, rewards, and the algorithms that turn rollouts into a loss."""
