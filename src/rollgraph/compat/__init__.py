"""Help for users of Megatron, NeMo-RL and Transformer Engine: diagnosis, repairs and a config importer.

Inside rollgraph, only `commands/config.py` and `commands/doctor.py` import this package; the architecture test enforces
that. Importing it imports none of those packages.
"""
