"""The inputs of a run: everything that its configuration names, read and checked before anything is allocated.

Start reading at `inputs.py`. `plan/` decides whether these inputs fit into memory, and `run/` builds a run from them.
"""
