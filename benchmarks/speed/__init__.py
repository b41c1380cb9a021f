"""How long things take, on the CPU and on a GPU, beside PyTorch and JAX."""
