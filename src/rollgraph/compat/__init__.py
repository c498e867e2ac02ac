"""Guards for the Megatron family: what breaks in a stack people already run, and repairs that need no edit of it.

Nothing else of rollgraph imports this package, and importing it imports none of theirs.
"""
