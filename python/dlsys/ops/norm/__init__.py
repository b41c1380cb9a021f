"""Normalization over the batch and over the last axes."""
