"""The kernels of the model: Triton on CUDA, Numba on a CPU. No other part of `model` compiles code."""
