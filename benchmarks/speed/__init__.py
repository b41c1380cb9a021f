"""Timings on the CPU and on a GPU, beside PyTorch and JAX."""
