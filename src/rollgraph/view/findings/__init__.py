"""What can be noticed about a run, a small file for each part of it. Thresholds stand at the head of each file."""
