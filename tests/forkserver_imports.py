"""Imported by the process that ranks are forked from, so that none of them has to do what takes long.

It runs the kernels of a CPU once, because loading them takes longer than most tests, and freezes what the imports have
made: a collection in a rank would otherwise copy all of it. It starts no thread, which a fork would lose.
"""

import gc

import torch
import torch._dynamo

import rollgraph.train  # noqa: F401
from rollgraph.inference import Engine, SamplingParams
from rollgraph.model import Architecture, Decoder
from rollgraph.tokenizer import ByteTokenizer

threads = torch.get_num_threads()
torch.set_num_threads(1)
tiny = Decoder(Architecture("qwen3", vocabulary=260, hidden=8, mlp=8, layers=1, heads=1, kv_heads=1, head_dim=8))
Engine(tiny, ByteTokenizer(), rows=1, max_length=16).generate(["a"], SamplingParams(max_tokens=2))
torch.set_num_threads(threads)
gc.collect()
gc.freeze()
