"""Imported by the forkserver, so that no rank repeats slow work.

It runs the CPU kernels once, because loading them takes longer than most tests. It freezes the objects of the imports,
whose pages a garbage collection in a rank would otherwise copy. It starts no thread, since a fork would lose it.
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
