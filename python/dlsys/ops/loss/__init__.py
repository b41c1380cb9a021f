"""Softmax and losses."""
