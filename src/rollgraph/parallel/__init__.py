"""Parallelism: process groups, data parallelism with sharded state (ZeRO, FSDP) and tensor parallelism.

    ranks/    which process this is, which ranks are alive, how they join, stop and fail
    tensor/   tensor parallel groups, as sharding and checkpoints see them
    data/     flat buffers of parameters, sharded gradients and optimizer state, and the hooks that communicate
    fsdp/     sharded parameters, gathered layer by layer
    optim/    AdamW on shards

Start reading at `data/sharded_model.py`. Saving and loading are in `checkpoint/`."""
