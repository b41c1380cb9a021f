"""The rows of samples.py for losses."""
