"""Tensors: calls of functions are recorded and computed by programs that are made once."""
