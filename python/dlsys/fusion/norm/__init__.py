"""Fusions around normalizations, with additions, activations, casts and sums."""
