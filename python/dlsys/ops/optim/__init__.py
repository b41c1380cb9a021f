"""Operators that update Parameters, and the rules of optimizers."""
