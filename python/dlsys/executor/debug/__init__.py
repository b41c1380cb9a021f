"""What can be seen of a run: checks against numpy, step times, reports."""
