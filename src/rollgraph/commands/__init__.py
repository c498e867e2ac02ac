"""The subcommands of `rollgraph`. Each file has `add_parser(commands)`, which also sets the function to run."""
