"""rollgraph post-trains language models with reinforcement learning, on captured graphs.

One process per GPU holds one set of weights that generates, scores and trains, and every phase
replays captured graphs: CUDA graphs on a GPU, a recorded tape on a CPU.

Importing any part of the package runs this file, so it imports nothing; import the part you need,
for example `rollgraph.graph`.
"""

__version__ = "0.1.0"
