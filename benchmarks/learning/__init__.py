"""Whole trainings and what they reach, beside the reference, PyTorch or what is expected."""
