"""Timings of inference: predictions, tokens, and the service, beside other runtimes."""
