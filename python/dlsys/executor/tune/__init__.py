"""Autotuning: which algorithm each kernel uses, by measurement."""
