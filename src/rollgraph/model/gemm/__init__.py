"""GEMMs whose rows have the same bits at any number of rows. `matmul.py` runs them.

`autotune.py` picks an algorithm for each on this device, among those of `candidates.py`."""
