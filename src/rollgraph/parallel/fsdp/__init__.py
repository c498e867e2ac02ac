"""FSDP: ranks keep shards of the parameters, and layers are gathered into a ring of slots."""
