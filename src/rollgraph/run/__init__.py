"""A run: its inputs, its parts, its folder, and everything that must survive the process."""
