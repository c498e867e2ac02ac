"""Help for people who run Megatron, NeMo-RL or Transformer Engine today: diagnosis, repairs and a config importer.

Only two commands import this package, as its door: `commands/config.py` and `commands/doctor.py`. Nothing else in
rollgraph may know about it, and the architecture test enforces that. Importing it imports none of those packages.
"""
