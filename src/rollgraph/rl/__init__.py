"""What is learned from: prompts, rewards, environments, and the algorithms that turn rollouts into a loss."""
