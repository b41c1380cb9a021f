"""One side each of a comparison at the same work: dlsys, PyTorch or JAX, in its own process."""
