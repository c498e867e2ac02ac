"""The sub-commands of `rollgraph`: each file has `add_to(commands)`, which sets the function that runs it."""
