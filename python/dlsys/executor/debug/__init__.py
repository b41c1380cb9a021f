"""Checks of runs against numpy, step times, and reports."""
