"""The rows of samples.py for fused operators, by fusion."""
