"""Timings of operators, one at a time, on the CPU and on a GPU, beside libraries and PyTorch."""
